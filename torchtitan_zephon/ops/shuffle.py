"""Shuffling, the accumulator that lets the sequences of a lane out in a keyed random order."""

import numpy as np

from torchtitan_zephon.order import derive_key, shuffled

# Starting a segment costs as much as some rows do, and the rows are the same however many are made
# at a time: so a segment is at least this long, however few are shuffled.
_ROWS_TOGETHER = 16


def shuffled_rows(buffer_size: int, lanes: int) -> int:
    """Sequences shuffled among each other: the lane's part of the job-wide buffer."""
    return max(1, -(-buffer_size // lanes))


def segment_rows(shuffled_rows: int) -> int:
    """Sequences of a segment: those that are shuffled among each other, or several times them."""
    return shuffled_rows * max(1, -(-_ROWS_TOGETHER // shuffled_rows))


def emission_order(seed: int, lane: int, first: int, rows: int, shuffled_rows: int) -> np.ndarray:
    """Which of some rows of a lane goes out first, second and so on: int64 [rows].

    ``first`` is the number of the first of them in the lane, a multiple of ``shuffled_rows``.
    """
    if shuffled_rows == 1:
        return np.arange(rows)
    order = [np.arange(0)]
    for at in range(0, rows, shuffled_rows):
        key = derive_key(seed, "sequences", lane, (first + at) // shuffled_rows)
        order.append(at + shuffled(min(shuffled_rows, rows - at), key))
    return np.concatenate(order)
