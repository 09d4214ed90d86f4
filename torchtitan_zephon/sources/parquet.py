"""Parquet: one row a document, cut by rows; no footer is read before its shard is visited."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_zephon.sources.storage import Shard, SourceError

SUFFIXES = (".parquet", ".pq")
_BLOCK_BYTES = 1 << 18  # text decoded and tokenized at a time


def chunk_bytes(total: int, lanes: int) -> int:
    """Bytes of a chunk (as compressed in the file): two chunks a lane, 2 MiB of a large dataset."""
    return max(1 << 14, min(total // (2 * lanes), 1 << 21))


def read_blocks(
    fs: Any, shard: Shard, chunk: int, chunks: int, size: int, text_field: str
) -> Iterator[list[str]]:
    """The texts of chunk ``chunk`` of ``chunks``, in blocks of about 256 KiB.

    The unit that is dealt out is a whole row group, or an equal part of one where there are more
    chunks than row groups. A part has its row group decoded from the start, so row groups much
    larger than 2 MiB cost reading time; the stream does not depend on it.
    """
    del size
    with fs.open(shard.path, "rb") as handle:
        try:
            file = pq.ParquetFile(handle)
        except pa.ArrowException as error:
            raise SourceError(f"{shard.path}: not a readable Parquet file: {error}") from error
        column = _column(file, shard, text_field)
        groups = file.metadata.num_row_groups
        parts = -(-chunks // groups) if groups else 1
        units = groups * parts
        first_row = 0
        for group in range(groups):
            meta = file.metadata.row_group(group)
            rows = meta.num_rows
            lo = max(chunk * units // chunks, group * parts)
            hi = min((chunk + 1) * units // chunks, (group + 1) * parts)
            if lo < hi:
                begin = (lo - group * parts) * rows // parts
                end = (hi - group * parts) * rows // parts
                width = max(1, meta.column(column).total_uncompressed_size // max(1, rows))
                step = max(1, _BLOCK_BYTES // width)
                texts = _rows(file, shard, group, begin, end, step, text_field, first_row)
                try:
                    yield from texts
                except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                    raise SourceError(
                        f"{shard.path}, row group {group}, column {text_field!r}: cannot be "
                        f"read: {error}"
                    ) from error
            first_row += rows


def _column(file: pq.ParquetFile, shard: Shard, text_field: str) -> int:
    names = file.schema_arrow.names
    if text_field not in names:
        raise SourceError(
            f"{shard.path}: no column {text_field!r}; columns here: {', '.join(names)}"
            " (set text_field)"
        )
    kind = file.schema_arrow.field(text_field).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if value not in (pa.string(), pa.large_string(), pa.string_view()):
        raise SourceError(f"{shard.path}: column {text_field!r} holds {kind}, not strings")
    return next(
        i
        for i in range(file.metadata.num_columns)
        if file.schema.column(i).path.split(".")[0] == text_field
    )


def _rows(
    file: pq.ParquetFile,
    shard: Shard,
    group: int,
    begin: int,
    end: int,
    step: int,
    text_field: str,
    first_row: int,
) -> Iterator[list[str]]:
    """Rows ``begin`` to ``end`` of a row group, ``step`` at a time whatever Arrow returns."""
    if begin == end:
        return
    held: list[str] = []
    at = 0
    for batch in file.iter_batches(batch_size=step, row_groups=[group], columns=[text_field]):
        lo, hi = max(begin - at, 0), min(end - at, batch.num_rows)
        if lo < hi:
            values = batch.column(0).slice(lo, hi - lo)
            if values.null_count:
                row = first_row + at + lo + values.is_null().index(True).as_py()
                raise SourceError(
                    f"{shard.path}, row {row}: column {text_field!r} is null; every row must hold "
                    "a string"
                )
            held.extend(values.to_pylist())
        at += batch.num_rows
        while len(held) >= step:
            yield held[:step]
            held = held[step:]
        if at >= end:
            break
    if held:
        yield held
