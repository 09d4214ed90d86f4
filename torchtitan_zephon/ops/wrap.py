"""``wrap`` packing: documents laid end to end and cut into rows, nothing dropped or padded."""

import numpy as np

from torchtitan_zephon.ops.documents import Documents, Reference, Rows, reference_to

_NONE = np.empty(0, dtype=np.int32)
_LONG = 256  # tokens of a document on average


class Wrap:
    """Concatenates documents and cuts them every ``seq_len`` pairs.

    A segment ends with a row, so all that is ever unfinished is the tail of one document.
    """

    def __init__(self, seq_len: int, pad_id: int):
        self.full = False
        self._seq_len, self._pad_id = seq_len, pad_id
        self._tail: tuple[Reference, np.ndarray] | None = None
        self.begin(0)

    def begin(self, rows: int) -> None:
        self._tokens = np.empty(rows * self._seq_len, dtype=np.int32)
        self._pairs = 0  # of all documents taken: more than there are places, at the end
        self._sizes: list[np.ndarray] = []
        self._lasts: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        self._last = _NONE  # the last document's tokens
        self._begun = 0  # pairs of the first document that earlier segments had
        self.full = False
        if self._tail is not None:
            reference, tokens = self._tail
            place = np.array([reference[:4]], dtype=np.int64)
            bounds = np.array([0, len(tokens)], dtype=np.int64)
            self._tail, self._begun = None, reference.start
            self.push(Documents(tokens, bounds, place))

    def wanted(self) -> int:
        return len(self._tokens) - self._pairs

    def push(self, documents: Documents) -> int:
        bounds = documents.bounds
        sizes = np.diff(bounds) - 1
        used = min(len(documents), int(np.searchsorted(np.cumsum(sizes), self.wanted())) + 1)
        ends = bounds[1 : used + 1] - 1
        tokens = documents.tokens[: bounds[used]]
        # Inputs leave out each document's last token: by slices that is one copy less than by a
        # mask, where there are not too many of them.
        if len(tokens) > _LONG * used:
            begins, stops = bounds[:used].tolist(), ends.tolist()
            inputs = [tokens[a:b] for a, b in zip(begins, stops, strict=True)]
        else:
            keep = np.ones(len(tokens), dtype=bool)
            keep[ends] = False
            inputs = [tokens[keep]]
        count = len(tokens) - used
        room = self._tokens[self._pairs : self._pairs + count]
        if len(room) < count:
            inputs[-1] = inputs[-1][: len(room) - count]
        np.concatenate(inputs, out=room)
        self._pairs += count
        self._sizes.append(sizes[:used])
        self._lasts.append(tokens[ends])
        self._places.append(documents.places[:used])
        self._last = tokens[bounds[used - 1] :]
        self.full = self._pairs >= len(self._tokens)
        return used

    def close(self) -> None:
        rows = -(-self._pairs // self._seq_len)
        self._tokens = self._tokens[: rows * self._seq_len]
        self._tokens[self._pairs :] = ~self._pad_id

    def take(self) -> Rows:
        tokens, seq_len = self._tokens, self._seq_len
        size = min(self._pairs, len(tokens))
        sizes = np.concatenate([_NONE.astype(np.int64), *self._sizes])
        firsts = np.cumsum(sizes) - sizes
        # A piece begins with each document and each row.
        begins = np.sort(np.concatenate([firsts[firsts < size], np.arange(0, size, seq_len)]))
        begins = begins[np.diff(begins, prepend=-1) > 0]
        ends = np.append(begins[1:], size)[: len(begins)]
        document = np.searchsorted(firsts, begins, side="right") - 1
        # Behind a piece comes what the next row begins with, or its document's last token.
        after = tokens[np.minimum(ends, size - 1)]
        if self._pairs > size:
            begun = self._begun if len(sizes) == 1 else 0
            tail = self._last[len(self._last) - 1 - (self._pairs - size) :]
            after[-1] = tail[0]
            place, stop = self._places[-1][-1].tolist(), begun + int(sizes[-1])
            # A copy, lest the tail keep its whole block in memory.
            reference = reference_to(place, stop - (len(tail) - 1), stop)
            self._tail = reference, tail.copy()
        whole = ends == (firsts + sizes)[document]
        after[whole] = np.concatenate([_NONE, *self._lasts])[document[whole]]
        offset = begins - firsts[document]
        offset[document == 0] += self._begun
        places = np.concatenate([np.empty((0, 4), dtype=np.int64), *self._places])[document]
        pieces = np.column_stack(
            [begins // seq_len, begins % seq_len, places, offset, offset + ends - begins]
        )
        self._sizes, self._lasts, self._places, self._last = [], [], [], _NONE
        return Rows(tokens.reshape(-1, seq_len), pieces, after)

    def flush(self) -> list[list[Reference]]:
        return [] if self._tail is None else [[self._tail[0]]]

    def restore(self, unfinished: list[list[tuple[Reference, np.ndarray]]]) -> None:
        self._tail = unfinished[0][0] if unfinished else None
