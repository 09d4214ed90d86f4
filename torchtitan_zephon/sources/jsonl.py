"""JSON Lines: one JSON object a line, cut into byte ranges without reading the file first."""

import functools
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from torchtitan_zephon.sources.storage import Field, Shard, SourceError, read_range

SUFFIXES = (".jsonl", ".ndjson", ".json")
_OPEN, _CLOSE, _NEWLINE = b"{}\n"
_COUNT_LINES_UP_TO = 1 << 30  # beyond this an error names the byte only: counting would take long


def chunk_bytes(total: int, lanes: int) -> int:
    """Bytes of a chunk: several chunks a lane of a small dataset, 256 KiB of a large one."""
    return max(1 << 10, min(total // (8 * lanes), 1 << 18))


def read_blocks(
    fs: Any, shard: Shard, chunk: int, chunks: int, size: int, field: Field | None
) -> Iterator[list[Any]]:
    """One block: what ``field`` holds, or whole records, of the lines that start in the chunk.

    Texts are strings, token ids int32 arrays.
    """
    del chunks
    # In one expression: what a generator has in a variable it holds while it waits, in every lane.
    yield _values(*whole_lines(fs, shard, chunk * size, (chunk + 1) * size), fs, shard, field)


def whole_lines(fs: Any, shard: Shard, start: int, end: int) -> tuple[bytes, int]:
    """The lines that start in ``[start, end)`` to their ends, and the byte at which they start."""
    # A line starts at byte 0 and behind every newline: the byte before the range tells whether one
    # starts right at it. A line that runs over the end is read on in doubling steps, so a line
    # longer than many chunks is read once, whole, by the chunk it starts in.
    first = max(0, start - 1)
    slack = max(1 << 10, (end - start) // 8)
    data = read_range(fs, shard, first, end + slack)
    begin = 0 if start == 0 else data.find(b"\n", 0, end - first - 1) + 1
    if start > 0 and begin == 0:
        return b"", start
    while True:
        stop = data.find(b"\n", end - first - 1)
        if stop >= 0:
            return data[begin : stop + 1], first + begin
        if first + len(data) >= shard.size:
            return data[begin:], first + begin
        more = max(1 << 16, len(data))
        data += read_range(fs, shard, first + len(data), first + len(data) + more)


@functools.cache
def _decoder(field: Field | None) -> msgspec.json.Decoder[Any]:
    if field is None:
        return msgspec.json.Decoder(dict[str, Any])
    kind = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]] if field.tokens else str
    value = ("value", kind, msgspec.field(name=field.name))
    return msgspec.json.Decoder(msgspec.defstruct("Record", [value], gc=False))


def _values(data: bytes, start: int, fs: Any, shard: Shard, field: Field | None) -> list[Any]:
    decoder = _decoder(field)
    try:
        records = decoder.decode_lines(data)
        # The decoder minds no line ends: two objects on a line, or one over two, are its to take.
        if not _one_a_line(data, len(records)):
            records = [decoder.decode(line) for line in data.split(b"\n") if line.strip()]
        if field is None:
            return records
        if field.tokens:
            return [np.array(record.value, dtype=np.int32) for record in records]
        return [record.value for record in records]
    except (msgspec.DecodeError, UnicodeError):
        pass
    lines = data.split(b"\n")
    wanted = "a JSON object"
    if field is not None:
        kind = "a list of token ids" if field.tokens else "a string"
        wanted += f" with {kind} under {field.name!r}"
    for line in lines:
        if line.strip():
            try:
                decoder.decode(line)
            except (msgspec.DecodeError, UnicodeError) as error:
                raise SourceError(
                    f"{_place(fs, shard, start)}: {str(error).replace('`', '')}"
                    f"; the line begins {line[:60]!r}; every line must be {wanted}"
                ) from error
        start += len(line) + 1
    raise AssertionError("a block failed to decode, its lines one by one did not")


def _one_a_line(data: bytes, count: int) -> bool:
    """Whether ``count`` objects stand on as many lines: sure if True, False for blank lines too."""
    # "}" and then, on the next line, "{" never stand inside an object.
    text = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(text == _NEWLINE)
    inner = ends[:-1] if data.endswith(b"\n") else ends
    return len(inner) == count - 1 and bool(
        (text[inner - 1] == _CLOSE).all() and (text[inner + 1] == _OPEN).all()
    )


def _place(fs: Any, shard: Shard, byte: int) -> str:
    if byte > _COUNT_LINES_UP_TO:
        return f"{shard.path}, byte {byte}"
    line = 1 + sum(
        read_range(fs, shard, at, min(at + (1 << 24), byte)).count(b"\n")
        for at in range(0, byte, 1 << 24)
    )
    return f"{shard.path}, line {line}"
