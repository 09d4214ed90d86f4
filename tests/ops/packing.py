"""Driving a packer as a lane does, on documents written as lists of token ids."""

import numpy as np

from torchtitan_zephon.ops.documents import IGNORE_LABEL, Documents, Packer, Reference, Rows

PAD, NO = 99, IGNORE_LABEL


def documents(tokens: list[list[int]], first_row: int = 0) -> Documents:
    """Documents of dataset 0, chunk 0, block 0, with rows counted from ``first_row``."""
    bounds = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    places = np.zeros((len(tokens), 4), dtype=np.int64)
    places[:, 3] = np.arange(first_row, first_row + len(tokens))
    flat = np.array([t for d in tokens for t in d], dtype=np.int32)
    return Documents(flat, bounds, places)


class Corpus:
    """Documents that a packer draws in order, ``window`` at a time, to their end."""

    def __init__(self, tokens: list[list[int]], window: int = 3, at: int = 0):
        self.tokens, self.window, self.at = tokens, window, at

    def segment(self, packer: Packer, rows: int) -> Rows:
        """The packer's next segment."""
        packer.begin(rows)
        while not packer.full:
            if self.at == len(self.tokens):
                packer.close()
                break
            assert packer.wanted() > 0
            part = self.tokens[self.at : self.at + self.window]
            self.at += packer.push(documents(part, self.at))
        return packer.take()

    def read(self, unfinished: list[list[Reference]]) -> list[list[tuple[Reference, np.ndarray]]]:
        """What ``flush`` returned, with the tokens that it refers to."""
        return [
            [(r, np.array(self.tokens[r.row][r.start : r.stop + 1], dtype=np.int32)) for r in row]
            for row in unfinished
        ]


def assert_rows(rows: Rows, inputs: list, labels: list, positions: list, padding: int = 0) -> None:
    """Compares with literal rows, and the arrays with what ``Rows`` promises of them."""
    assert rows.sequences.tolist() == [inputs, labels, positions]
    assert rows.padding == padding
    for array in (rows.tokens, rows.after, rows.sequences):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert rows.pieces.dtype == np.int64


def assert_equal_rows(left: Rows, right: Rows) -> None:
    """The same rows in every array."""
    assert left.sequences.tolist() == right.sequences.tolist()
    assert left.pieces.tolist() == right.pieces.tolist()
    assert left.padding == right.padding


def assert_pieces_rebuild(rows: Rows, tokens: list[list[int]]) -> None:
    """Rows made again from the documents by the pieces table are the rows, padding and all."""
    shape = rows.tokens.shape
    inputs, labels = np.full(shape, PAD), np.full(shape, NO)
    positions = np.full(shape, -1)
    for row, column, _, ordinal, block, document, start, stop in rows.pieces.tolist():
        assert (ordinal, block) == (0, 0)
        end = column + stop - start
        assert column < end <= shape[1]
        assert (labels[row, column:end] == NO).all()
        piece = tokens[document][start : stop + 1]
        inputs[row, column:end] = [t if t >= 0 else ~t for t in piece[:-1]]
        labels[row, column:end] = [t if t >= 0 else NO for t in piece[1:]]
        positions[row, column:end] = np.arange(stop - start)
    padded = positions == -1
    for row in range(shape[0]):
        positions[row, padded[row]] = np.arange(padded[row].sum())
    assert rows.sequences.tolist() == [inputs.tolist(), labels.tolist(), positions.tolist()]
    assert rows.padding == padded.sum()
    assert rows.pieces[:, :2].tolist() == sorted(rows.pieces[:, :2].tolist())


def pairs_of(segments: list[Rows]) -> list[tuple[int, int]]:
    """(document, pair) of everything trained, sorted."""
    return sorted(
        (document, pair)
        for rows in segments
        for *_, document, start, stop in rows.pieces.tolist()
        for pair in range(start, stop)
    )
