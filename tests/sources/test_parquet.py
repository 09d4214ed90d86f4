"""Parquet: rows once and in order whatever the row groups and chunks, bad shards named."""

from collections.abc import Iterable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toys import write_parquet
from torchtitan_zephon.sources import parquet
from torchtitan_zephon.sources.storage import Field, Shard, SourceError

LOCAL = fsspec.filesystem("file")


def chunked(path: Path, chunks: int, field: str = "text") -> list[list[list[str]]]:
    """The blocks of each chunk."""
    shard = Shard(str(path), path.name, path.stat().st_size)
    return [
        list(parquet.read_blocks(LOCAL, shard, c, chunks, 0, Field(field))) for c in range(chunks)
    ]


def flat(blocks: Iterable[Iterable[list[str]]]) -> list[str]:
    return [text for chunk in blocks for block in chunk for text in block]


def refusal(path: Path, chunks: int = 1, field: str = "text") -> str:
    with pytest.raises(SourceError) as caught:
        chunked(path, chunks, field)
    return str(caught.value)


def numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 60), group=st.integers(1, 70), chunks=st.integers(1, 30))
def test_all_chunks_together_give_every_row_once_and_in_order(
    tmp_path_factory, rows, group, chunks
):
    path = write_parquet(tmp_path_factory.mktemp("p") / "a.parquet", numbers(rows), group)
    assert flat(chunked(path, chunks)) == numbers(rows)


def test_whole_row_groups_are_dealt_to_fewer_chunks(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", numbers(10), row_group_size=2)
    assert [flat([c]) for c in chunked(path, 2)] == [["0", "1", "2", "3"], numbers(10)[4:]]
    assert [flat([c]) for c in chunked(path, 5)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6", "7"],
        ["8", "9"],
    ]


def test_one_large_row_group_is_cut_into_equal_parts(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", numbers(9), row_group_size=100)
    assert [flat([c]) for c in chunked(path, 3)] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
        ["6", "7", "8"],
    ]
    assert [flat([c]) for c in chunked(path, 2)] == [
        ["0", "1", "2", "3"],
        ["4", "5", "6", "7", "8"],
    ]


def test_chunks_beyond_the_rows_are_empty_and_no_row_comes_twice(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", numbers(3), row_group_size=100)
    assert [flat([c]) for c in chunked(path, 5)] == [[], ["0"], [], ["1"], ["2"]]


def test_a_chunk_is_given_in_blocks_of_about_256_kib_of_text(tmp_path):
    text = [f"{i:06d}" + "x" * 1018 for i in range(1000)]
    pq.write_table(
        pa.table({"text": text}), tmp_path / "a.parquet", compression="none", use_dictionary=False
    )
    ((*whole, last),) = chunked(tmp_path / "a.parquet", 1)
    assert {len(block) for block in whole} == {len(whole[0])}
    assert 200_000 < len(whole[0]) * 1024 < 262_144 + 1024
    assert 0 < len(last) <= len(whole[0])
    assert flat([[*whole, last]]) == text


class Splitting:
    """A Parquet file whose batches come in other sizes than asked for, as Arrow may return them."""

    def __init__(self, file: pq.ParquetFile, sizes: list[int]):
        self._file, self._sizes = file, sizes

    def iter_batches(self, batch_size, row_groups, columns, use_threads):
        assert not use_threads
        table = self._file.read_row_group(row_groups[0], columns=columns).combine_chunks()
        (whole,) = table.to_batches()
        at = 0
        while at < len(whole):
            for size in self._sizes:
                yield whole.slice(at, size)
                at += size


@pytest.mark.parametrize("sizes", [[1], [2, 5], [3], [100], [7, 1, 1]])
def test_blocks_do_not_depend_on_the_batches_that_arrow_returns(tmp_path, sizes):
    path = write_parquet(tmp_path / "a.parquet", numbers(23))
    with pq.ParquetFile(path) as file:
        shard = Shard(str(path), "a.parquet", 1)
        blocks = list(
            parquet._rows(Splitting(file, sizes), shard, 0, 2, 21, 5, Field("text"), 0)  # pyrefly: ignore
        )
    assert [len(b) for b in blocks] == [5, 5, 5, 4]
    assert flat([blocks]) == numbers(23)[2:21]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
def test_all_kinds_of_strings_are_read(tmp_path, kind):
    pq.write_table(pa.table({"text": pa.array(["a", "é😀", ""], kind)}), tmp_path / "a.parquet")
    assert flat(chunked(tmp_path / "a.parquet", 2)) == ["a", "é😀", ""]


def test_a_column_of_categories_is_read_as_its_strings(tmp_path):
    column = pa.array(["b", "a", "b"]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert flat(chunked(tmp_path / "a.parquet", 1)) == ["b", "a", "b"]


def test_other_columns_are_left_alone_even_beside_nested_ones(tmp_path):
    table = pa.table({"meta": [{"a": 1, "text": "no"}], "tags": [["x"]], "text": ["yes"], "n": [1]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert flat(chunked(tmp_path / "a.parquet", 1)) == ["yes"]


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_a_null_is_named_by_its_row_in_the_file(tmp_path, chunks):
    path = write_parquet(tmp_path / "a.parquet", [*numbers(17), None, "z", None], row_group_size=6)
    assert refusal(path, chunks) == (
        f"{path}, row 17: column 'text' is null; every row must hold a string"
    )


def test_a_missing_column_is_told_the_columns_there(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == (
        f"{tmp_path}/a.parquet: no column 'text'; columns here: body, id (set text_field)"
    )
    assert flat(chunked(tmp_path / "a.parquet", 1, "body")) == ["a"]


@pytest.mark.parametrize(
    ("values", "kind"), [([1], "int64"), ([["a"]], "list<element: string>"), ([b"a"], "binary")]
)
def test_a_column_of_another_type_is_refused(tmp_path, values, kind):
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == (
        f"{tmp_path}/a.parquet: column 'text' holds {kind}, not strings"
    )


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1, or so it says")
    assert refusal(tmp_path / "a.parquet").startswith(
        f"{tmp_path}/a.parquet: not a readable Parquet file: "
    )


def test_a_damaged_page_is_named_by_its_file(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [f"word {i}" for i in range(5000)], 5000)
    data = bytearray(path.read_bytes())
    data[200:260] = b"\xff" * 60
    path.write_bytes(data)
    assert str(path) in refusal(path)


def test_text_that_is_not_utf8_is_named_by_its_file(tmp_path):
    offsets = pa.py_buffer(b"\0\0\0\0\2\0\0\0")
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert f"{tmp_path}/a.parquet" in refusal(tmp_path / "a.parquet")


def test_a_file_without_rows_has_no_blocks(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [])
    assert flat(chunked(path, 3)) == []


def test_chunk_bytes_give_each_lane_two_chunks_of_a_small_dataset_and_end_at_2_mib():
    assert parquet.chunk_bytes(1_000, 4) == 16_384
    assert parquet.chunk_bytes(8_000_000, 4) == 1_000_000
    assert parquet.chunk_bytes(10**13, 64) == 2_097_152


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int64()),
        pa.large_list(pa.uint16()),
        pa.list_(pa.uint32()),
        pa.list_(pa.int8()),
    ],
)
def test_token_ids_are_int32_whatever_integers_the_file_holds(tmp_path, kind):
    table = pa.table({"ids": pa.array([[1, 2], [], [3], [4, 5, 6]], kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    shard = Shard(f"{tmp_path}/a.parquet", "a.parquet", 1)
    blocks = list(parquet.read_blocks(LOCAL, shard, 0, 1, 0, Field("ids", tokens=True)))
    ids = [document for block in blocks for document in block]
    assert [d.tolist() for d in ids] == [[1, 2], [], [3], [4, 5, 6]]
    assert {d.dtype for d in ids} == {np.dtype(np.int32)}


def test_token_ids_in_lists_of_one_length_are_read(tmp_path):
    table = pa.table({"ids": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))})
    pq.write_table(table, tmp_path / "a.parquet")
    shard = Shard(f"{tmp_path}/a.parquet", "a.parquet", 1)
    blocks = parquet.read_blocks(LOCAL, shard, 1, 2, 0, Field("ids", tokens=True))
    assert [[d.tolist() for d in block] for block in blocks] == [[[3, 4], [5, 6]]]


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ([[1], None], ", row 1: column 'ids' is null; every row must hold a list of token ids"),
        ([[1], [2, None]], ", rows from 0 on, column 'ids': a token id is null"),
        ([[-1, 2**31]], ", rows from 0 on, column 'ids': token ids from -1 to 2147483648 do"),
    ],
)
def test_token_ids_that_cannot_be_ids_are_refused(tmp_path, ids, fault):
    table = pa.table({"ids": pa.array(ids, pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet")
    shard = Shard(f"{tmp_path}/a.parquet", "a.parquet", 1)
    with pytest.raises(SourceError) as caught:
        list(parquet.read_blocks(LOCAL, shard, 0, 1, 0, Field("ids", tokens=True)))
    assert str(caught.value).startswith(f"{tmp_path}/a.parquet{fault}")
