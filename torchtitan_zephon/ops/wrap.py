"""``wrap`` packing: documents laid end to end and cut into rows, nothing dropped or padded."""

import numpy as np

from torchtitan_zephon.ops.documents import (
    IGNORE_LABEL,
    Documents,
    Reference,
    Rows,
    as_inputs,
    as_labels,
    reference_to,
)


class Wrap:
    """Concatenates documents and cuts them every ``seq_len`` pairs.

    A segment ends with a row, so all that is ever unfinished is the tail of one document.
    """

    def __init__(self, seq_len: int, pad_id: int):
        self.full = False
        self._seq_len, self._pad_id = seq_len, pad_id
        self._tail: tuple[Reference, np.ndarray] | None = None
        self._parts: list[Documents] = []
        self._starts: list[int] = []
        self._places = self._pairs = 0

    def begin(self, rows: int) -> None:
        self._places = rows * self._seq_len
        self._parts, self._starts, self._pairs = [], [], 0
        self.full = False
        if self._tail is not None:
            reference, tokens = self._tail
            place = np.array([reference[:4]], dtype=np.int64)
            bounds = np.array([0, len(tokens)], dtype=np.int64)
            self._tail = None
            self._append(Documents(tokens, bounds, place), first_start=reference.start)

    def wanted(self) -> int:
        return self._places - self._pairs

    def push(self, documents: Documents) -> int:
        pairs = np.cumsum(np.diff(documents.bounds) - 1)
        used = min(len(documents), int(np.searchsorted(pairs, self.wanted())) + 1)
        end = documents.bounds[used]
        self._append(
            Documents(documents.tokens[:end], documents.bounds[: used + 1], documents.places[:used])
        )
        return used

    def _append(self, documents: Documents, first_start: int = 0) -> None:
        self._parts.append(documents)
        self._starts.append(first_start)
        self._pairs += int(documents.bounds[-1]) - len(documents)
        self.full = self._pairs >= self._places

    def close(self) -> None:
        rows = -(-self._pairs // self._seq_len)
        self._places = min(self._places, rows * self._seq_len)

    def take(self) -> Rows:
        size, seq_len = self._places, self._seq_len
        if size == 0:
            return _no_rows(seq_len)
        tokens = np.concatenate([p.tokens for p in self._parts])
        lengths = np.concatenate([np.diff(p.bounds) for p in self._parts])
        places = np.concatenate([p.places for p in self._parts])
        starts = np.zeros(len(lengths), dtype=np.int64)  # pairs of the document that are behind
        at = 0
        for part, first in zip(self._parts, self._starts, strict=True):
            starts[at] = first
            at += len(part)
        # Inputs leave out each document's last token, labels its first.
        ends = np.cumsum(lengths)
        keep = np.ones(len(tokens), dtype=bool)
        keep[ends - 1] = False
        inputs = tokens[keep]
        keep[ends - 1] = True
        keep[ends - lengths] = False
        labels = tokens[keep]
        first_pair = ends - lengths - np.arange(len(lengths))
        last = len(lengths) - 1
        self._tail = None
        if len(inputs) > size:
            done = size - int(first_pair[last])
            stop = int(starts[last] + lengths[last] - 1)
            reference = reference_to(places[last].tolist(), int(starts[last]) + done, stop)
            # A copy, lest the tail keep its whole block in memory.
            self._tail = reference, tokens[len(tokens) - (len(inputs) - size) - 1 :].copy()
            inputs, labels = inputs[:size], labels[:size]
        padding = size - len(inputs)
        if padding:
            inputs = np.append(inputs, np.full(padding, self._pad_id, dtype=np.int32))
            labels = np.append(labels, np.full(padding, IGNORE_LABEL, dtype=np.int32))
        # A piece begins with each document, each row, and the padding; the padding is no piece.
        edges = np.arange(0, size, seq_len)
        edges = np.union1d(first_pair[first_pair < size], edges[edges < size - padding])
        lengths_of = np.diff(np.append(edges, size - padding))
        positions = np.arange(size) - np.repeat(
            np.append(edges, size - padding), np.append(lengths_of, padding)
        )
        document = np.searchsorted(first_pair, edges, side="right") - 1
        offset = starts[document] + edges - first_pair[document]
        pieces = np.column_stack(
            [
                edges // seq_len,
                edges % seq_len,
                places[document],
                offset,
                offset + lengths_of,
            ]
        )
        self._parts, self._starts, self._pairs = [], [], 0
        shape = (size // seq_len, seq_len)
        return Rows(
            as_inputs(inputs).reshape(shape),
            as_labels(labels).reshape(shape),
            positions.astype(np.int32).reshape(shape),
            pieces,
            padding,
        )

    def flush(self) -> list[list[Reference]]:
        return [] if self._tail is None else [[self._tail[0]]]

    def restore(self, unfinished: list[list[tuple[Reference, np.ndarray]]]) -> None:
        self._tail = unfinished[0][0] if unfinished else None


def _no_rows(seq_len: int) -> Rows:
    none = np.empty((0, seq_len), dtype=np.int32)
    return Rows(none, none, none, np.empty((0, 8), dtype=np.int64), 0)
