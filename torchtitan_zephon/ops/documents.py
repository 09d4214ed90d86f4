"""What passes between the accumulators of a lane: documents in, packed rows out."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

IGNORE_LABEL = -100
"""Label of padding, which the loss leaves out (PyTorch's ``ignore_index``)."""


def as_inputs(tokens: np.ndarray) -> np.ndarray:
    """Token ids, whether they are loss targets or not.

    A token that is read but not trained on, a user's turn in a chat say, is kept as the complement
    ``~id`` of its id, which is negative: so what is masked goes where its token goes.
    """
    if len(tokens) == 0 or tokens.min() >= 0:
        return tokens
    return np.where(tokens < 0, ~tokens, tokens)


def as_labels(tokens: np.ndarray) -> np.ndarray:
    """Token ids as labels: ``IGNORE_LABEL`` for those that are not trained on."""
    if len(tokens) == 0 or tokens.min() >= 0:
        return tokens
    return np.where(tokens < 0, IGNORE_LABEL, tokens)


class Reference(NamedTuple):
    """A stretch of a document by where it is: what a checkpoint holds of unfinished work."""

    dataset: int
    ordinal: int
    block: int
    row: int
    start: int
    """First (input, label) pair of the document that belongs to the stretch."""
    stop: int
    """The pair behind its last."""


@dataclass(frozen=True)
class Documents:
    """Whole documents in the order in which a lane draws them."""

    tokens: np.ndarray
    """Token ids, complements where they are no loss targets, int32 [N]."""
    bounds: np.ndarray
    """Where documents begin and end in ``tokens``, int64 [n + 1]; each has two tokens or more."""
    places: np.ndarray
    """dataset, ordinal, block and row of each document, int64 [n, 4]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class Rows:
    """Packed rows, all arrays C-contiguous."""

    inputs: np.ndarray
    """Token ids, int32 [rows, seq_len]."""
    labels: np.ndarray
    """The document's next token, or ``IGNORE_LABEL``, int32 [rows, seq_len]."""
    positions: np.ndarray
    """Position in the document, restarting with the row, int32 [rows, seq_len]."""
    pieces: np.ndarray
    """What the rows are made of, int64 [pieces, 8]: row, column, and the fields of Reference."""
    padding: int
    """Places filled with padding."""
    dropped: int = 0
    """Tokens of long documents that were dropped, as ``long_documents`` asks for."""


def reference_to(place: list[int], start: int, stop: int) -> Reference:
    """A stretch of the document at ``place``: dataset, ordinal, block and row."""
    dataset, ordinal, block, row = place
    return Reference(dataset, ordinal, block, row, start, stop)


class Packer(Protocol):
    """The accumulator that fills the rows of one segment after another.

    A segment goes ``begin``, ``push`` until ``full`` (or ``close`` where the data ends), ``take``,
    ``flush``. What ``flush`` returns, given to ``restore`` of a new packer, makes it go on as this
    one would: that the two agree is tested at every boundary.
    """

    full: bool

    def begin(self, rows: int) -> None:
        """Start a segment of ``rows`` rows."""
        ...

    def wanted(self) -> int:
        """Pairs that may still be of use in this segment."""
        ...

    def push(self, documents: Documents) -> int:
        """Take documents from the front; how many were taken."""
        ...

    def close(self) -> None:
        """No document will follow: finish what is open, with padding."""
        ...

    def take(self) -> Rows:
        """The rows of the segment, at most as many as it was begun with."""
        ...

    def flush(self) -> list[list[Reference]]:
        """Unfinished work: one list for each open row."""
        ...

    def restore(self, unfinished: list[list[tuple[Reference, np.ndarray]]]) -> None:
        """Go on from a ``flush``, each reference with its tokens, int32 [stop - start + 1]."""
        ...
