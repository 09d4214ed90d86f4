"""Shuffling, the accumulator that lets the sequences of a segment out in a keyed random order."""

import numpy as np

from torchtitan_zephon.order import derive_key, shuffled
from torchtitan_zephon.recipe import ShuffleConfig

_ROWS_UNSHUFFLED = 16  # a segment's length where it decides nothing but how much is replayed


def segment_rows(config: ShuffleConfig, lanes: int) -> int:
    """Sequences of a segment: the lane's part of the job-wide buffer."""
    if config.buffer_size == 0:
        return _ROWS_UNSHUFFLED
    return -(-config.buffer_size // lanes)


def emission_order(
    config: ShuffleConfig, seed: int, lane: int, segment: int, rows: int
) -> np.ndarray:
    """Which row of the segment goes out first, second and so on: int64 [rows]."""
    if config.buffer_size == 0:
        return np.arange(rows)
    seed = seed if config.seed is None else config.seed
    return shuffled(rows, derive_key(seed, "sequences", lane, segment))
