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
    fs: Any, shard: Shard, chunk: int, chunks: int, size: int, field: str | None
) -> Iterator[list[Any]]:
    """Column ``field``, or whole rows, of chunk ``chunk`` of ``chunks``, about 256 KiB a block.

    The unit that is dealt out is a whole row group, or an equal part of one where there are more
    chunks than row groups. A part has its row group decoded from the start, so row groups much
    larger than 2 MiB cost reading time; the stream does not depend on it.
    """
    with fs.open(shard.path, "rb") as handle:
        try:
            file = pq.ParquetFile(handle)
        except pa.ArrowException as error:
            raise SourceError(f"{shard.path}: not a readable Parquet file: {error}") from error
        columns = range(file.metadata.num_columns)
        if field is not None:
            columns = [_column(file, shard, field)]
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
                size = sum(meta.column(c).total_uncompressed_size for c in columns)
                step = max(1, _BLOCK_BYTES // max(1, size // max(1, rows)))
                values = _rows(file, shard, group, begin, end, step, field, first_row)
                try:
                    yield from values
                except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                    what = "" if field is None else f", column {field!r}"
                    raise SourceError(
                        f"{shard.path}, row group {group}{what}: cannot be read: {error}"
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
    field: str | None,
    first_row: int,
) -> Iterator[list[Any]]:
    """Rows ``begin`` to ``end`` of a row group, ``step`` at a time whatever Arrow returns."""
    if begin == end:
        return
    held: list[Any] = []
    at = 0
    columns = None if field is None else [field]
    for batch in file.iter_batches(batch_size=step, row_groups=[group], columns=columns):
        lo, hi = max(begin - at, 0), min(end - at, batch.num_rows)
        if lo < hi:
            values = (
                batch.slice(lo, hi - lo) if field is None else batch.column(0).slice(lo, hi - lo)
            )
            if field is not None and values.null_count:
                row = first_row + at + lo + values.is_null().index(True).as_py()
                raise SourceError(
                    f"{shard.path}, row {row}: column {field!r} is null; every row must hold a "
                    "string"
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
