"""JSON Lines: any cut gives every line once, bad lines are named, bytes are read about once."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_zephon.sources import jsonl
from torchtitan_zephon.sources.storage import Field, Shard, SourceError

LINE = b'{"text": "a"}\n'


class CountingFs:
    """One file in memory that counts the bytes read from it."""

    def __init__(self, data: bytes):
        self.data = data
        self.read = 0

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        assert path == "data/a.jsonl"
        part = self.data[start:end]
        self.read += len(part)
        return part


def texts(data: bytes | CountingFs, size: int, field: str = "text") -> list[str]:
    """All texts of a file that is cut into chunks of ``size`` bytes."""
    fs: Any = data if isinstance(data, CountingFs) else CountingFs(data)
    shard = Shard("data/a.jsonl", "a.jsonl", len(fs.data))
    chunks = -(-shard.size // size)
    return [
        text
        for chunk in range(chunks)
        for block in jsonl.read_blocks(fs, shard, chunk, chunks, size, Field(field))
        for text in block
    ]


def refusal(data: bytes, size: int = 1000) -> str:
    with pytest.raises(SourceError) as caught:
        texts(data, size)
    return str(caught.value)


def lines(values: list[str], end: str = "\n", last: bool = True) -> bytes:
    rows = [json.dumps({"text": v}, ensure_ascii=len(v) % 2 == 0) for v in values]
    return (end.join(rows) + (end if last and rows else "")).encode("utf-8")


TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.builds(lambda c, n: c * n, st.sampled_from(["x", "é", "😀"]), st.integers(0, 400)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(
    values=TEXTS,
    size=st.integers(1, 300),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n"]),
    last=st.booleans(),
)
def test_all_chunks_together_give_every_line_once_and_in_order(values, size, end, last):
    assert texts(lines(values, end, last), size) == values


def test_every_chunk_size_gives_the_same_lines_exhaustively():
    values = ["", "a", "b" * 30, "", "é\u2028ß", "c" * 90]
    data = lines(values)
    for size in range(1, len(data) + 2):
        assert texts(data, size) == values


def test_a_chunk_holds_the_lines_that_start_in_its_bytes():
    data = b"".join(b'{"text": "%d"}\n' % i for i in range(6))  # 14 bytes a line
    fs: Any = CountingFs(data)
    shard = Shard("data/a.jsonl", "a.jsonl", len(data))

    def blocks(chunk: int, size: int) -> list[list[str]]:
        return list(jsonl.read_blocks(fs, shard, chunk, -(-len(data) // size), size, Field("text")))

    assert [blocks(c, 28) for c in range(3)] == [[["0", "1"]], [["2", "3"]], [["4", "5"]]]
    assert [blocks(c, 29) for c in range(3)] == [[["0", "1", "2"]], [["3", "4"]], [["5"]]]
    assert [blocks(c, 27) for c in range(4)] == [[["0", "1"]], [["2", "3"]], [["4", "5"]], [[]]]
    assert [blocks(c, 7) for c in range(12)] == [
        [[str(c // 2)] if c % 2 == 0 else []] for c in range(12)
    ]


def test_a_line_much_longer_than_a_chunk_is_given_whole_by_the_chunk_it_starts_in():
    values = ["a", "x" * 1_000_000, "b"]
    assert texts(lines(values), 1024) == values


@pytest.mark.parametrize("size", [1024, 10_000, 1 << 18])
def test_reading_a_file_of_short_lines_costs_time_linear_in_its_size(size):
    fs = CountingFs(lines([f"document {i} " * (i % 7) for i in range(20_000)]))
    assert len(texts(fs, size)) == 20_000
    chunks = -(-len(fs.data) // size)
    assert fs.read <= 1.25 * len(fs.data) + 1100 * chunks


@pytest.mark.parametrize("size", [1024, 10_000, 1 << 18])
def test_reading_a_file_of_one_huge_line_costs_time_linear_in_its_size(size):
    fs = CountingFs(lines(["a", "x" * 3_000_000, "b"]))
    assert len(texts(fs, size)) == 3
    chunks = -(-len(fs.data) // size)
    assert fs.read <= 2.5 * len(fs.data) + 1100 * chunks


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lines(["a", "b"], last=False), ["a", "b"]),
        (b'{"text": "a"}\r\n{"text": "b\\r\\n"}\r\n', ["a", "b\r\n"]),
        (b'\n\r\n  \n{"text": "a"}\n\n\n', ["a"]),
        ('{"text": "a\u2028b\u2029c\u0085d"}\n'.encode(), ["a\u2028b\u2029c\u0085d"]),
        (b'{"text": "\\ud83d\\ude00 \\u0000 \\n"}\n', ["😀 \0 \n"]),
        (b'{"id": 1, "meta": {"text": "no"}, "text": "yes", "x": [null]}\n', ["yes"]),
        (b"\n\n \n", []),
    ],
    ids=[
        "no newline at the end",
        "CRLF",
        "blank lines",
        "U+2028",
        "escapes",
        "other keys",
        "blank",
    ],
)
def test_odd_but_right_files_are_read(data, expected):
    assert texts(data, 1000) == expected


def test_the_text_may_be_under_another_key():
    assert texts('{"text": 1, "Körper.text": "a"}\n'.encode(), 1000, "Körper.text") == ["a"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'\xef\xbb\xbf{"text": "a"}', "JSON is malformed: invalid character (byte 0)"),
        (b'{"text": "\xff"}', "Invalid UTF-8 encoded string"),
        (b'{"text": null}', "Expected str, got null - at $.text"),
        (b'{"txt": "a"}', "Object missing required field text"),
        (b'{"text": 3}', "Expected str, got int - at $.text"),
        (b'{"text": "\\udc00 lone"}', "JSON is malformed: invalid utf-16 surrogate pair"),
        (b'{"text": "\\ud800"}', ""),
        (b'{"text": "\xed\xa0\x80"}', "Invalid UTF-8 encoded string"),
        (b'{"text": "trunca', "Input data was truncated"),
        (b'["a"]', "Expected object, got array"),
        (b'"a"', "Expected object, got str"),
        (b'{"text": "a"} {"text": "b"}', "JSON is malformed: trailing characters"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 500])
def test_a_bad_line_is_named_by_file_and_line_wherever_it_stands(bad, reason, before):
    data = LINE * before + bad + b"\n" + LINE * 3
    message = refusal(data)
    assert message.startswith(f"data/a.jsonl, line {before + 1}: {reason}")
    assert message.endswith(
        f"; the line begins {bad[:60]!r}; every line must be a JSON object with a string under "
        "'text'"
    )


def test_blank_lines_count_as_lines_in_an_error():
    assert refusal(b"\n\r\n" + LINE + b"\n{}\n").startswith("data/a.jsonl, line 5: ")


def test_a_truncated_last_line_is_named():
    assert refusal(LINE * 300 + b'{"text": "ab').startswith("data/a.jsonl, line 301: ")


def test_a_bad_line_longer_than_many_chunks_is_named_once_with_its_beginning():
    message = refusal(LINE * 200 + b'{"text": "' + b"x" * 50_000 + b"\n" + LINE)
    assert message.startswith("data/a.jsonl, line 201: ")
    assert len(message) < 300


def test_far_into_a_huge_file_an_error_names_the_byte(monkeypatch):
    monkeypatch.setattr(jsonl, "_COUNT_LINES_UP_TO", 1000)
    assert refusal(LINE * 100 + b"{}\n").startswith("data/a.jsonl, byte 1400: ")
    assert refusal(LINE * 10 + b"{}\n").startswith("data/a.jsonl, line 11: ")


def test_chunk_bytes_give_each_lane_of_a_small_dataset_several_chunks_and_end_at_256_kib():
    assert jsonl.chunk_bytes(1_000, 4) == 1024
    assert jsonl.chunk_bytes(1_000_000, 4) == 31_250
    assert jsonl.chunk_bytes(10**13, 64) == 262_144


def token_ids(data: bytes, size: int = 1000) -> list[Any]:
    shard = Shard("data/a.jsonl", "a.jsonl", len(data))
    fields = Field("ids", tokens=True)
    blocks = jsonl.read_blocks(CountingFs(data), shard, 0, 1, size, fields)
    return [ids for block in blocks for ids in block]


def test_token_ids_are_int32_arrays():
    first, second = token_ids(b'{"ids": [1, 2147483647]}\n{"ids": []}\n')
    assert (first.tolist(), second.tolist()) == ([1, 2147483647], [])
    assert first.dtype == second.dtype == np.int32


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"ids": [1, -1]}', "Expected int >= 0 - at $.ids[1]"),
        (b'{"ids": [2147483648]}', "Expected int <= 2147483647 - at $.ids[0]"),
        (b'{"ids": [1.5]}', "Expected int, got float - at $.ids[0]"),
        (b'{"ids": [true]}', "Expected int, got bool - at $.ids[0]"),
        (b'{"ids": "1 2"}', "Expected array, got str - at $.ids"),
    ],
)
def test_a_line_without_token_ids_is_named(line, reason):
    with pytest.raises(SourceError) as caught:
        token_ids(b'{"ids": [1]}\n' + line + b"\n")
    assert str(caught.value) == (
        f"data/a.jsonl, line 2: {reason}; the line begins {line!r}; every line must be a JSON "
        "object with a list of token ids under 'ids'"
    )


@pytest.mark.parametrize(
    "data",
    [
        b'{"text": "a"} {"text": "b"}\n{"text":\n"c"}\n',
        b'{"text": "a"}{"text": "b"}\n\n',
        b'{"text":\n"a"}',
    ],
)
def test_an_object_has_a_line_of_its_own(data):
    assert refusal(data).startswith("data/a.jsonl, line 1: ")
