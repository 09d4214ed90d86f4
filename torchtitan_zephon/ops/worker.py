"""The worker half: a block of records in, tokenized documents out, with no state between blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_zephon.ops.functions import Function, FunctionError, apply_functions
from torchtitan_zephon.order import shuffled
from torchtitan_zephon.sources.storage import Field

# Texts, token ids or chat records to the token ids of documents: ids int32 [N], complements where
# they are no loss target, and bounds int64 [documents + 1].
Encode = Callable[[list[Any]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Encoded:
    """The documents of one block."""

    tokens: np.ndarray
    """Token ids of all documents in a row, int32 [N]."""
    bounds: np.ndarray
    """Where documents begin and end in ``tokens``, int64 [documents + 1]; each has two or more."""
    empty: int
    """Documents left out because they hold under two tokens, so nothing to predict."""
    filtered: int
    """Records that a filter left out."""


Apply = Callable[[Sequence[Function], list[dict[str, Any]], str], tuple[list[dict[str, Any]], int]]


@dataclass(frozen=True)
class Worker:
    """What is done to a block of one dataset."""

    functions: tuple[Function, ...]
    field: Field | None
    """What of the records documents are made of; None where blocks hold that already, or chats."""
    encode: Encode
    apply: Apply = apply_functions

    def __call__(self, records: list[Any], place: str, key: int | None) -> Encoded:
        """The documents of a block, in keyed random order if there is a ``key``.

        Raises:
            FunctionError, ValueError: naming ``place``.
        """
        filtered = 0
        if self.functions:
            records, filtered = self.apply(self.functions, records, place)
        if key is not None:
            records = [records[i] for i in shuffled(len(records), key).tolist()]
        if self.field is not None:
            records = [_value(record, self.field, place) for record in records]
        try:
            tokens, bounds = self.encode(records)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        lengths = np.diff(bounds)
        kept = lengths >= 2
        empty = len(lengths) - int(kept.sum())
        if empty:
            tokens = tokens[np.repeat(kept, lengths)]
            bounds = np.concatenate([[0], np.cumsum(lengths[kept])])
        return Encoded(tokens, bounds, empty, filtered)


def _value(record: dict[str, Any], field: Field, place: str) -> Any:
    value = record.get(field.name)
    if not field.tokens and isinstance(value, str):
        return value
    if field.tokens and isinstance(value, list | np.ndarray):
        ids = np.asarray(value)
        if len(ids) == 0 or (ids.ndim == 1 and ids.dtype.kind in "iu" and int(ids.max()) < 2**31):
            return ids.astype(np.int32)
    wanted = "a list of token ids" if field.tokens else "a string"
    raise FunctionError(
        f"{place}: a record has {str(value)[:80]} under {field.name!r} where {wanted} is wanted; "
        f"it is {str(record)[:200]}"
    )
