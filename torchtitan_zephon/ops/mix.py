"""Mixing, the accumulator that decides from which dataset the next document comes.

A lane draws from the dataset with the smallest ``tokens so far / weight``, the first in the recipe
on a tie. For each dataset those quotients never fall, so drawing one by one equals sorting the
documents at hand by (quotient before the document, dataset), which is done here for many at a time.
"""

import numpy as np

from torchtitan_zephon.ops.documents import Documents
from torchtitan_zephon.recipe import MAX_WEIGHT_BITS
from torchtitan_zephon.sources.feed import Block, Feed

_DIGIT_BITS = 63 - MAX_WEIGHT_BITS  # a remainder times 2**_DIGIT_BITS fits an int64


class Mixture:
    """Draws documents from ``feeds`` so that token shares follow ``weights`` (integers) exactly."""

    def __init__(self, feeds: list[Feed], weights: list[int]):
        self.feeds = feeds
        self._weights = weights

    def window(self, wanted: int) -> Documents | None:
        """The next documents, at least one and about ``wanted`` pairs of them; None at the end."""
        at_hand: list[tuple[int, Block, int, int, np.ndarray]] = []
        for index, feed in enumerate(self.feeds):
            block = feed.block()
            if block is None:
                continue
            row = feed.position.row
            # Pairs before each document, one fewer than tokens in each.
            pairs = block.bounds[row:] - block.bounds[row]
            pairs = pairs - np.arange(len(pairs))
            stop = min(int(np.searchsorted(pairs, wanted)), len(pairs) - 1)
            at_hand.append((index, block, row, row + stop, pairs[: stop + 1]))
        if not at_hand:
            return None
        runs = [at_hand[0][:4]] if len(at_hand) == 1 else self._merged(at_hand, wanted)
        return _gather(runs)

    def advance(self, documents: Documents, used: int) -> None:
        """Move past the first ``used`` documents of a window."""
        owners = documents.places[:used, 0]
        pairs = np.diff(documents.bounds[: used + 1]) - 1
        for index, feed in enumerate(self.feeds):
            mine = owners == index
            feed.position.row += int(np.count_nonzero(mine))
            feed.position.tokens += int(pairs[mine].sum())

    def _merged(
        self, at_hand: list[tuple[int, Block, int, int, np.ndarray]], wanted: int
    ) -> list[tuple[int, Block, int, int]]:
        """All datasets' windows merged into runs: (dataset, block, first row, last row + 1)."""
        # Quotients are compared as their whole parts and, digit by digit, their fractions: two
        # fractions with denominators up to w differ by 1 / w**2 or more, so twice the bits of the
        # largest weight make the comparison exact.
        digits = -(-(2 * max(self._weights).bit_length() + 1) // _DIGIT_BITS)
        keys: list[list[np.ndarray]] = [[] for _ in range(1 + digits)]
        owner = []
        for slot, (index, _, _, _, pairs) in enumerate(at_hand):
            weight = self._weights[index]
            quotient, rest = np.divmod(self.feeds[index].position.tokens + pairs, weight)
            keys[0].append(quotient)
            for key in keys[1:]:
                quotient, rest = np.divmod(rest << _DIGIT_BITS, weight)
                key.append(quotient)
            owner.append(np.full(len(pairs), slot))
        # The sort is stable and the datasets are laid out in recipe order: ties go to the earlier.
        order = np.lexsort([np.concatenate(key) for key in reversed(keys)])
        slots = np.concatenate(owner)[order]
        # The last entry of each dataset stands for a document not at hand yet: from the first such
        # entry on, nothing can be decided.
        ends = np.cumsum([len(o) for o in owner]) - 1
        limit = int(np.flatnonzero(np.isin(order, ends))[0])
        slots = slots[:limit]
        lengths = np.concatenate([np.append(np.diff(pairs), 0) for *_, pairs in at_hand])[
            order[:limit]
        ]
        limit = min(limit, int(np.searchsorted(np.cumsum(lengths), wanted)) + 1)
        slots = slots[:limit]
        cuts = np.flatnonzero(np.diff(slots)) + 1
        starts = np.concatenate([[0], cuts]).tolist()
        stops = np.concatenate([cuts, [len(slots)]]).tolist()
        next_row = [row for _, _, row, _, _ in at_hand]
        runs = []
        for start, stop in zip(starts, stops, strict=True):
            slot = int(slots[start])
            index, block = at_hand[slot][:2]
            row = next_row[slot]
            next_row[slot] = row + stop - start
            runs.append((index, block, row, next_row[slot]))
        return runs


def _gather(runs: list[tuple[int, Block, int, int]]) -> Documents:
    tokens = [b.tokens[b.bounds[lo] : b.bounds[hi]] for _, b, lo, hi in runs]
    lengths = [np.diff(b.bounds[lo : hi + 1]) for _, b, lo, hi in runs]
    count = sum(len(x) for x in lengths)
    bounds = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=bounds[1:])
    places = np.empty((count, 4), dtype=np.int64)
    at = 0
    for index, block, lo, hi in runs:
        part = places[at : at + hi - lo]
        part[:, :3] = index, block.ordinal, block.number
        part[:, 3] = np.arange(lo, hi)
        at += hi - lo
    return Documents(tokens[0] if len(tokens) == 1 else np.concatenate(tokens), bounds, places)
