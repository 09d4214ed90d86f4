"""Parquet: one row a document, cut by rows; no footer is read before its shard is visited."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_zephon.sources.columns import BLOCK_BYTES, check_column, deal, documents, find
from torchtitan_zephon.sources.storage import Field, Shard, SourceError

SUFFIXES = (".parquet", ".pq")


def chunk_bytes(total: int, lanes: int) -> int:
    """Bytes of a chunk (as compressed in the file): two chunks a lane, 2 MiB of a large dataset."""
    return max(1 << 14, min(total // (2 * lanes), 1 << 21))


def read_blocks(
    fs: Any, shard: Shard, chunk: int, chunks: int, size: int, field: Field | None
) -> Iterator[list[Any]]:
    """Column ``field``, or whole rows, of chunk ``chunk`` of ``chunks``, about 256 KiB a block.

    Texts are strings, token ids int32 arrays. What is dealt out is row groups, or equal parts of
    them. A part has its row group decoded from the start, so row groups much larger than 2 MiB cost
    reading time; the stream does not depend on it.
    """
    del size
    with fs.open(shard.path, "rb") as handle:
        file = _open(handle, shard)
        metadata = file.metadata
        columns = range(metadata.num_columns)
        if field is not None:
            check_column(file.schema_arrow, shard, field)
            columns = [i for i in columns if _top(file, i) == field.name]
        for group, first_row, begin, end in deal(_counts(file), chunk, chunks):
            meta = metadata.row_group(group)
            if field is not None and field.tokens:
                size = 4 * meta.column(columns[0]).num_values
            else:
                size = sum(meta.column(c).total_uncompressed_size for c in columns)
            step = max(1, BLOCK_BYTES // max(1, size // max(1, meta.num_rows)))
            blocks = _rows(file, shard, group, begin, end, step, field, first_row)
            while True:
                # Not around the yield: a generator that waits may outlive the names in `except`.
                try:
                    ready: list[Any] = [next(blocks, None)]
                except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                    what = "" if field is None else f", column {field.name!r}"
                    raise SourceError(
                        f"{shard.path}, row group {group}{what}: cannot be read: {error}"
                    ) from error
                if ready[0] is None:
                    break
                yield ready.pop()


def find_row(
    fs: Any, shard: Shard, chunk: int, chunks: int, place: int, field: Field | None
) -> tuple[int, Any]:
    """Number, counted in the shard, and value of the ``place``-th row of a chunk."""
    with fs.open(shard.path, "rb") as handle:
        file = _open(handle, shard)
        group, at, row = find(_counts(file), chunk, chunks, place, shard)
        columns = None if field is None else [field.name]
        record = file.read_row_group(group, columns=columns).slice(at, 1).to_pylist()[0]
        return row, record[field.name] if field else record


def _open(handle: Any, shard: Shard) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(handle)
    except pa.ArrowException as error:
        raise SourceError(f"{shard.path}: not a readable Parquet file: {error}") from error


def _counts(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]


def _top(file: pq.ParquetFile, column: int) -> str:
    return file.schema.column(column).path.split(".")[0]


def _rows(
    file: pq.ParquetFile,
    shard: Shard,
    group: int,
    begin: int,
    end: int,
    step: int,
    field: Field | None,
    first_row: int,
) -> Iterator[list[Any]]:
    """Rows ``begin`` to ``end`` of a row group, ``step`` at a time whatever Arrow returns."""
    if begin == end:
        return
    held: list[Any] = []
    at = 0
    columns = None if field is None else [field.name]
    read = file.iter_batches(
        batch_size=step, row_groups=[group], columns=columns, use_threads=False
    )
    for batch in read:
        lo, hi = max(begin - at, 0), min(end - at, batch.num_rows)
        if lo < hi:
            held.extend(documents(batch.slice(lo, hi - lo), shard, first_row + at + lo, field))
        at += batch.num_rows
        del batch  # and no variable for what is yielded: a generator that waits holds its variables
        while len(held) >= step:
            held, ready = held[step:], [held[:step]]
            yield ready.pop()
        if at >= end:
            break
    if held:
        ready = [held]
        del held
        yield ready.pop()
