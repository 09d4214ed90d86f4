"""What passes between the accumulators of a lane: documents in, packed rows out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

IGNORE_LABEL = -100
"""Label of padding, which the loss leaves out (PyTorch's ``ignore_index``)."""
_PLACES = np.arange(1 << 17, dtype=np.int32)  # made once, for as many as are usually laid out


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
    """Token ids, int32 [N]. A token that is read but not trained on, of a user's chat turn say, is
    the complement ``~id`` of its id, which is negative: so a mask goes where its token goes."""
    bounds: np.ndarray
    """Where documents begin and end in ``tokens``, int64 [n + 1]; each has two tokens or more."""
    places: np.ndarray
    """dataset, ordinal, block and row of each document, int64 [n, 4]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class Rows:
    """Packed rows: their tokens, and the pieces of documents that these come from.

    ``inputs``, ``labels`` and ``positions`` follow from those: see ``lay_out``. So a segment that
    waits to be handed out takes four bytes a token, and not twelve.
    """

    tokens: np.ndarray
    """The token that each place reads, int32 [rows, seq_len]: complements where they are no
    loss targets (see ``Documents``), as padding is."""
    pieces: np.ndarray
    """What the rows are made of, in order, int64 [pieces, 8]: row, column, and the fields of
    Reference. Pieces lie side by side from column 0 on; what they leave of a row is padding."""
    after: np.ndarray
    """The token behind each piece in its document, int32 [pieces]: the label of its last place."""
    dropped: int = 0
    """Tokens of long documents that were dropped, as ``long_documents`` asks for."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def padding(self) -> int:
        """Places filled with padding."""
        return self.tokens.size - int((self.pieces[:, 7] - self.pieces[:, 6]).sum())

    @cached_property
    def masked(self) -> bool:
        """Whether any token is no loss target."""
        return any(len(x) > 0 and int(x.min()) < 0 for x in (self.tokens, self.after))

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Pieces and stretches of padding, in order.

        Where each begins in the rows laid end to end, int64 [runs]; the token behind it, int32
        [runs]; and for each row, then for the end, which run is its first.
        """
        rows, seq_len = self.tokens.shape
        row, sizes = self.pieces[:, 0], self.pieces[:, 7] - self.pieces[:, 6]
        starts, after = row * seq_len + self.pieces[:, 1], self.after
        if self.padding:
            filled = np.bincount(row, sizes, rows).astype(np.int64)
            padded = np.flatnonzero(filled < seq_len)
            starts = np.concatenate([starts, padded * seq_len + filled[padded]])
            after = np.concatenate([after, np.full(len(padded), -1, dtype=np.int32)])
            order = np.argsort(starts, kind="stable")
            starts, after = starts[order], after[order]
        return starts, after, np.searchsorted(starts, np.arange(rows + 1) * seq_len).tolist()

    @cached_property
    def sequences(self) -> np.ndarray:
        """Inputs, labels and positions of all rows, int32 [3, rows, seq_len]."""
        return lay_out([(self, row) for row in range(len(self))], self.tokens.shape[1], np.int32)


def padding_row(seq_len: int, pad_id: int) -> Rows:
    """A row of nothing but padding."""
    tokens = np.full((1, seq_len), ~pad_id, dtype=np.int32)
    return Rows(tokens, np.empty((0, 8), dtype=np.int64), np.empty(0, dtype=np.int32))


def lay_out(picks: Sequence[tuple[Rows, int]], seq_len: int, dtype: type) -> np.ndarray:
    """Inputs, labels and positions of chosen rows, [3, len(picks), seq_len] of ``dtype``.

    Inputs are token ids. A label is the document's next token, or ``IGNORE_LABEL`` for padding and
    for what is no loss target. Positions restart at 0 with each piece, so with each row.
    """
    out = np.empty((3, len(picks), seq_len), dtype=dtype)
    if not picks:
        return out
    inputs, labels, positions = out
    count = len(picks)
    starts, after, shifts, runs = [], [], [], []
    masked = False
    for i, (rows, row) in enumerate(picks):
        inputs[i] = rows.tokens[row]
        at, behind, first = rows.runs
        lo, hi = first[row], first[row + 1]
        starts.append(at[lo:hi])
        after.append(behind[lo:hi])
        shifts.append((i - row) * seq_len)
        runs.append(hi - lo)
        masked |= rows.masked
    edges = np.empty(sum(runs) + 1, dtype=np.int64)
    np.concatenate(starts, out=edges[:-1])
    edges[:-1] += np.repeat(shifts, runs)
    edges[-1] = count * seq_len
    # A label is the next input, but for the last of each run.
    flat = labels.reshape(-1)
    flat[:-1] = inputs.reshape(-1)[1:]
    flat[edges[1:] - 1] = np.concatenate(after)
    begins = np.repeat(edges[:-1].astype(np.int32), edges[1:] - edges[:-1])
    places = _PLACES[: len(begins)]
    if len(begins) > len(places):
        places = np.arange(len(begins), dtype=np.int32)
    np.subtract(places, begins, out=begins)
    positions.reshape(-1)[:] = begins
    if masked:
        negative = inputs < 0
        np.invert(inputs, out=inputs, where=negative)
        np.copyto(labels, IGNORE_LABEL, where=labels < 0)
    return out


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
