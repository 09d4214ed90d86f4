"""``first_fit`` packing: documents kept whole in the first open row that has room."""

import numpy as np

from torchtitan_zephon.ops.documents import IGNORE_LABEL, Documents, Reference, Rows, reference_to

_Piece = tuple[Reference, np.ndarray]


class FirstFit:
    """Puts each document whole into the oldest of up to ``open_bins`` open rows that has room.

    A row is finished when it is full, or, as the fullest one (the oldest on a tie), when a document
    fits nowhere and no more rows may be opened. A document longer than a row fills whole rows of
    its own; only what remains of it looks for room.
    """

    def __init__(self, seq_len: int, pad_id: int, open_bins: int):
        self.full = False
        self._seq_len, self._pad_id, self._open_bins = seq_len, pad_id, open_bins
        self._bins: list[list[_Piece]] = []
        self._room: list[int] = []
        self._rest: _Piece | None = None  # of a long document that filled the segment's last row
        self._done: list[list[_Piece]] = []
        self._rows = 0

    def begin(self, rows: int) -> None:
        self._rows, self._done, self.full = rows, [], False
        rest, self._rest = self._rest, None
        if rest is not None:
            self._place(*rest)

    def wanted(self) -> int:
        return (self._rows - len(self._done)) * self._seq_len

    def push(self, documents: Documents) -> int:
        bounds = documents.bounds.tolist()
        for i, place in enumerate(documents.places.tolist()):
            if self.full:
                return i
            tokens = documents.tokens[bounds[i] : bounds[i + 1]]
            self._place(reference_to(place, 0, len(tokens) - 1), tokens)
        return len(documents)

    def _place(self, reference: Reference, tokens: np.ndarray) -> None:
        seq_len = self._seq_len
        while reference.stop - reference.start >= seq_len:
            middle = reference.start + seq_len
            self._finish([(reference._replace(stop=middle), tokens[: seq_len + 1])])
            reference, tokens = reference._replace(start=middle), tokens[seq_len:]
            if self.full:
                # Copies, here and below, lest a stretch keep its whole block in memory.
                if reference.start < reference.stop:
                    self._rest = reference, tokens.copy()
                return
        size = reference.stop - reference.start
        if size == 0:
            return
        piece = reference, tokens.copy()
        for i, room in enumerate(self._room):
            if room >= size:
                self._bins[i].append(piece)
                self._room[i] = room - size
                if room == size:
                    self._close_bin(i)
                return
        if len(self._bins) == self._open_bins:
            self._close_bin(self._room.index(min(self._room)))
        self._bins.append([piece])
        self._room.append(seq_len - size)

    def _close_bin(self, index: int) -> None:
        del self._room[index]
        self._finish(self._bins.pop(index))

    def _finish(self, row: list[_Piece]) -> None:
        self._done.append(row)
        self.full = len(self._done) >= self._rows

    def close(self) -> None:
        while self._bins and not self.full:
            self._close_bin(0)

    def take(self) -> Rows:
        shape = (len(self._done), self._seq_len)
        inputs = np.full(shape, self._pad_id, dtype=np.int32)
        labels = np.full(shape, IGNORE_LABEL, dtype=np.int32)
        positions = np.empty(shape, dtype=np.int32)
        count_up = np.arange(self._seq_len, dtype=np.int32)
        pieces = []
        padding = 0
        for r, row in enumerate(self._done):
            at = 0
            for reference, tokens in row:
                end = at + reference.stop - reference.start
                inputs[r, at:end] = tokens[:-1]
                labels[r, at:end] = tokens[1:]
                positions[r, at:end] = count_up[: end - at]
                pieces.append((r, at, *reference))
                at = end
            positions[r, at:] = count_up[: self._seq_len - at]
            padding += self._seq_len - at
        self._done = []
        return Rows(
            inputs, labels, positions, np.array(pieces, dtype=np.int64).reshape(-1, 8), padding
        )

    def flush(self) -> list[list[Reference]]:
        # The rest of a long document goes first, as a row of its own that may well be empty.
        rest = [] if self._rest is None else [self._rest[0]]
        bins = [[reference for reference, _ in row] for row in self._bins]
        return [rest, *bins] if rest or bins else []

    def restore(self, unfinished: list[list[_Piece]]) -> None:
        if not unfinished:
            return
        rest, *bins = unfinished
        self._rest = rest[0] if rest else None
        self._bins = [list(row) for row in bins]
        self._room = [
            self._seq_len - sum(ref.stop - ref.start for ref, _ in row) for row in self._bins
        ]
