"""What formats of columns share: dealing out rows, and a column's values as documents."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from torchtitan_zephon.sources.storage import Field, Shard, SourceError

BLOCK_BYTES = 1 << 18
"""Bytes of texts or token ids that are decoded and tokenized at a time."""


def deal(rows: Sequence[int], chunk: int, chunks: int) -> Iterator[tuple[int, int, int, int]]:
    """The rows of chunk ``chunk`` of ``chunks``, from groups of ``rows`` rows.

    What is dealt out is a whole group, or an equal part of one where there are more chunks than
    groups. Yields a group, the row of the shard that it begins with, and from which to which row
    of the group.
    """
    groups = len(rows)
    parts = -(-chunks // groups) if groups else 1
    units = groups * parts
    first_row = 0
    for group, count in enumerate(rows):
        lo = max(chunk * units // chunks - group * parts, 0)
        hi = min((chunk + 1) * units // chunks - group * parts, parts)
        if lo < hi:
            yield group, first_row, lo * count // parts, hi * count // parts
        first_row += count


def find(
    rows: Sequence[int], chunk: int, chunks: int, place: int, shard: Shard
) -> tuple[int, int, int]:
    """The ``place``-th row of a chunk, dealt as ``deal`` does: its group, and which row it is of
    the group and of the shard.

    Raises:
        SourceError: the chunk has fewer rows.
    """
    for group, first_row, begin, end in deal(rows, chunk, chunks):
        if place < end - begin:
            return group, begin + place, first_row + begin + place
        place -= end - begin
    raise SourceError(f"{shard.path}: it has fewer rows than before")


def check_column(schema: pa.Schema, shard: Shard, field: Field) -> None:
    """Raise SourceError unless the column is there and holds what ``field`` wants."""
    if field.name not in schema.names:
        setting = "tokens_field" if field.tokens else "text_field"
        raise SourceError(
            f"{shard.path}: no column {field.name!r}; columns here: {', '.join(schema.names)}"
            f" (set {setting})"
        )
    kind: Any = schema.field(field.name).type
    if field.tokens:
        wanted = "lists of integers"
        fits = _is_list(kind) and pa.types.is_integer(kind.value_type)
    else:
        wanted, value = "strings", kind.value_type if pa.types.is_dictionary(kind) else kind
        fits = value in (pa.string(), pa.large_string(), pa.string_view())
    if not fits:
        raise SourceError(f"{shard.path}: column {field.name!r} holds {kind}, not {wanted}")


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def documents(batch: pa.RecordBatch, shard: Shard, first_row: int, field: Field | None) -> list:
    """Texts as strings, token ids as int32 arrays, or whole rows as dicts, of some rows.

    Raises:
        SourceError: naming the first row, counted in the shard, that holds nothing.
    """
    if field is None:
        return batch.to_pylist()
    column: Any = batch.column(field.name)
    if column.null_count:
        row = first_row + column.is_null().index(True).as_py()
        kind = "list of token ids" if field.tokens else "string"
        raise SourceError(
            f"{shard.path}, row {row}: column {field.name!r} is null; every row must hold a {kind}"
        )
    if not field.tokens:
        return column.to_pylist()
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    bounds = column.offsets.to_numpy()
    flat = column.values.slice(bounds[0], bounds[-1] - bounds[0])
    place = f"{shard.path}, rows from {first_row} on, column {field.name!r}"
    if flat.null_count:
        raise SourceError(f"{place}: a token id is null")
    ids = flat.to_numpy()
    if ids.dtype != np.int32:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise SourceError(f"{place}: token ids from {ids.min()} to {ids.max()} do not fit")
        ids = ids.astype(np.int32)
    return [ids[a:b] for a, b in itertools.pairwise((bounds - bounds[0]).tolist())]
