"""Mixing, the accumulator that decides from which dataset the next document comes.

The choice is a function of the tokens drawn so far, so a lane's counts are all the state there is.
By default a lane draws from the dataset with the smallest ``tokens so far / weight``, the first in
the recipe on a tie. For each dataset those quotients never fall, so drawing one by one equals
sorting the documents at hand by (quotient before the document, dataset), which is done here for
many at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from torchtitan_zephon.ops.documents import Documents
from torchtitan_zephon.recipe import MAX_WEIGHT_BITS
from torchtitan_zephon.sources.feed import Block, Feed

_DIGIT_BITS = 63 - MAX_WEIGHT_BITS  # a remainder times 2**_DIGIT_BITS fits an int64


class WorkSource(Protocol):
    """Decides, document by document, which dataset a lane draws from.

    For one's own order: an object whose class has an import path, with no state of its own.
    """

    def choose(self, tokens: Sequence[int], available: Sequence[bool]) -> int:
        """The index of the dataset that the next document comes from.

        Args:
            tokens: (input, label) pairs that the lane has drawn from each dataset so far.
            available: which datasets have a document left; at least one has.
        """
        ...


class Sequential:
    """Draws all of a dataset, then all of the next, in the recipe's order."""

    def choose(self, tokens: Sequence[int], available: Sequence[bool]) -> int:
        """The first dataset that has a document left."""
        del tokens
        return available.index(True)


@dataclass(frozen=True)
class Phase:
    """Weights that hold from a number of tokens on."""

    from_tokens: int
    """Tokens of the lane, (input, label) pairs."""
    weights: tuple[int, ...]
    """For each dataset, whole numbers in the ratio of the shares; 0 leaves it out."""


class _AtHand(NamedTuple):
    """The next documents of one dataset, as far as they are known."""

    dataset: int
    block: Block | None
    row: int
    pairs: np.ndarray
    """Pairs before each document, and behind the last, int64 [documents + 1]."""


class Mixture:
    """Draws documents from ``feeds``, by ``phases`` of weights or by a ``source``.

    Args:
        feeds: one for each dataset.
        phases: in rising order, the first from 0 tokens on.
        on_exhausted: what happens when a dataset has had its passes: ``drop`` goes on without it,
            ``stop`` ends when it would be drawn from, ``repeat`` goes on until all have had theirs.
        phase, base: which phase it is in, and the datasets' tokens when that began.
        source: draws in the place of the weights, if given.
    """

    def __init__(
        self,
        feeds: list[Feed],
        phases: tuple[Phase, ...],
        on_exhausted: Literal["drop", "stop", "repeat"] = "drop",
        phase: int = 0,
        base: tuple[int, ...] = (),
        source: WorkSource | None = None,
    ):
        self.feeds = feeds
        self.phase = phase
        self.base = base or (0,) * len(feeds)
        self._phases, self._on_exhausted, self._source = phases, on_exhausted, source

    def window(self, wanted: int) -> Documents | None:
        """The next documents, at least one and about ``wanted`` pairs of them; None at the end."""
        total = sum(feed.position.tokens for feed in self.feeds)
        while self.phase + 1 < len(self._phases):
            left = self._phases[self.phase + 1].from_tokens - total
            if left > 0:
                wanted = min(wanted, left)
                break
            self.phase += 1
            self.base = tuple(feed.position.tokens for feed in self.feeds)
        weights = self._phases[self.phase].weights
        active = [i for i, weight in enumerate(weights) if weight > 0]
        if self._on_exhausted == "repeat" and all(
            self.feeds[i].has_had_its_passes() for i in active
        ):
            return None
        at_hand = [self._at_hand(i, wanted) for i in active]
        if self._on_exhausted != "stop":
            at_hand = [x for x in at_hand if x.block is not None]
        if not at_hand and self.phase + 1 < len(self._phases):
            # Nothing is left for this phase: the next one begins early.
            self.phase += 1
            self.base = tuple(feed.position.tokens for feed in self.feeds)
            return self.window(wanted)
        if not at_hand:
            return None
        if self._source is not None:
            runs = self._chosen(at_hand, self._source)
        elif len(at_hand) == 1:
            runs = [(at_hand[0], len(at_hand[0].pairs) - 1)]
        else:
            runs = self._merged(at_hand, wanted, [weights[x.dataset] for x in at_hand])
        return _gather(runs)

    def advance(self, documents: Documents, used: int) -> None:
        """Move past the first ``used`` documents of a window."""
        owners = documents.places[:used, 0]
        pairs = np.diff(documents.bounds[: used + 1]) - 1
        for index, feed in enumerate(self.feeds):
            mine = owners == index
            feed.position.row += int(np.count_nonzero(mine))
            feed.position.tokens += int(pairs[mine].sum())

    def _at_hand(self, dataset: int, wanted: int) -> _AtHand:
        feed = self.feeds[dataset]
        block, row = feed.block(), feed.position.row
        if block is None:
            return _AtHand(dataset, None, row, np.zeros(1, dtype=np.int64))
        pairs = block.bounds[row:] - block.bounds[row]
        pairs = pairs - np.arange(len(pairs))
        stop = min(int(np.searchsorted(pairs, wanted)), len(pairs) - 1)
        return _AtHand(dataset, block, row, pairs[: stop + 1])

    def _chosen(self, at_hand: list[_AtHand], source: WorkSource) -> list[tuple[_AtHand, int]]:
        """As many of the documents that ``source`` draws next as come from one dataset."""
        tokens = [feed.position.tokens for feed in self.feeds]
        known = {x.dataset: x for x in at_hand}
        available = [i in known and known[i].block is not None for i in range(len(self.feeds))]
        if not any(available):
            return []
        first = source.choose(tokens, available)
        if not (0 <= first < len(available) and available[first]):
            raise ValueError(
                f"work source {type(source).__name__} chose dataset {first}, which has no document "
                f"left; available were {[i for i, there in enumerate(available) if there]}"
            )
        pairs = known[first].pairs
        count = 1
        while count < len(pairs) - 1:
            tokens[first] = self.feeds[first].position.tokens + int(pairs[count])
            if source.choose(tokens, available) != first:
                break
            count += 1
        return [(known[first], count)]

    def _merged(
        self, at_hand: list[_AtHand], wanted: int, weights: list[int]
    ) -> list[tuple[_AtHand, int]]:
        """All datasets' documents merged: runs of so many documents of one dataset."""
        # Quotients are compared as their whole parts and, digit by digit, their fractions: two
        # fractions with denominators up to w differ by 1 / w**2 or more, so twice the bits of the
        # largest weight make the comparison exact.
        digits = -(-(2 * max(weights).bit_length() + 1) // _DIGIT_BITS)
        keys: list[list[np.ndarray]] = [[] for _ in range(1 + digits)]
        owner = []
        for slot, (x, weight) in enumerate(zip(at_hand, weights, strict=True)):
            tokens = self.feeds[x.dataset].position.tokens - self.base[x.dataset] + x.pairs
            quotient, rest = np.divmod(tokens, weight)
            keys[0].append(quotient)
            for key in keys[1:]:
                quotient, rest = np.divmod(rest << _DIGIT_BITS, weight)
                key.append(quotient)
            owner.append(np.full(len(x.pairs), slot))
        # The sort is stable and the datasets are laid out in recipe order: ties go to the earlier.
        order = np.lexsort([np.concatenate(key) for key in reversed(keys)])
        # The last entry of each dataset stands for a document not at hand yet, or for its end: from
        # the first such entry on, nothing can be decided.
        ends = np.cumsum([len(o) for o in owner]) - 1
        limit = int(np.flatnonzero(np.isin(order, ends))[0])
        slots = np.concatenate(owner)[order[:limit]]
        lengths = np.concatenate([np.append(np.diff(x.pairs), 0) for x in at_hand])[order[:limit]]
        slots = slots[: int(np.searchsorted(np.cumsum(lengths), wanted)) + 1]
        cuts = np.flatnonzero(np.diff(slots)) + 1
        starts = [0, *cuts.tolist()] if len(slots) else []
        stops = [*cuts.tolist(), len(slots)] if len(slots) else []
        runs = []
        taken = [0] * len(at_hand)
        for start, stop in zip(starts, stops, strict=True):
            slot = int(slots[start])
            x = at_hand[slot]
            runs.append((x._replace(row=x.row + taken[slot]), stop - start))
            taken[slot] += stop - start
        return runs


def _gather(runs: list[tuple[_AtHand, int]]) -> Documents | None:
    spans = [(x, x.block, x.row, x.row + n) for x, n in runs if x.block is not None]
    if not spans:
        return None
    tokens = [b.tokens[b.bounds[lo] : b.bounds[hi]] for _, b, lo, hi in spans]
    lengths = [np.diff(b.bounds[lo : hi + 1]) for _, b, lo, hi in spans]
    count = sum(len(x) for x in lengths)
    bounds = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=bounds[1:])
    places = np.empty((count, 4), dtype=np.int64)
    at = 0
    for x, block, lo, hi in spans:
        part = places[at : at + hi - lo]
        part[:, :3] = x.dataset, block.ordinal, block.number
        part[:, 3] = np.arange(lo, hi)
        at += hi - lo
    return Documents(tokens[0] if len(tokens) == 1 else np.concatenate(tokens), bounds, places)
