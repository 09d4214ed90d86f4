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

_MORE_AT_HAND = 4  # documents of each dataset beyond its share of what is wanted
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
            self._begin_next_phase()
        weights = self._phases[self.phase].weights
        active = [i for i, weight in enumerate(weights) if weight > 0]
        if self._on_exhausted == "repeat" and all(
            self.feeds[i].has_had_its_passes() for i in active
        ):
            return None
        if self._source is not None or len(active) == 1:
            at_hand = [self._at_hand(i, wanted, more=0) for i in active]
        else:
            # Of each its share of what is wanted and some documents: where that is too little for a
            # decision the window ends early, and nothing is lost but time.
            shares = 4 * sum(weights)
            parts = [(i, -(-5 * wanted * weights[i] // shares)) for i in active]
            at_hand = [self._at_hand(i, part, _MORE_AT_HAND) for i, part in parts]
        if self._on_exhausted != "stop":
            at_hand = [x for x in at_hand if x.block is not None]
        if not at_hand and self.phase + 1 < len(self._phases):
            # Nothing is left for this phase: the next one begins early.
            self._begin_next_phase()
            return self.window(wanted)
        if not at_hand:
            return None
        if self._source is not None:
            at_hand, count = self._chosen(at_hand, self._source)
            order = np.arange(count)
        elif len(at_hand) == 1:
            order = np.arange(len(at_hand[0].pairs) - 1)
        else:
            order = self._merged(at_hand, wanted, [weights[x.dataset] for x in at_hand])
        return _gather(at_hand, order) if len(order) else None

    def _begin_next_phase(self) -> None:
        self.phase += 1
        self.base = tuple(feed.position.tokens for feed in self.feeds)

    def advance(self, documents: Documents, used: int) -> None:
        """Move past the first ``used`` documents of a window."""
        owners = documents.places[:used, 0]
        pairs = documents.bounds[1 : used + 1] - documents.bounds[:used] - 1
        counts = np.bincount(owners, minlength=len(self.feeds))
        sums = np.bincount(owners, pairs, len(self.feeds))  # whole numbers, if as floats
        for index in np.flatnonzero(counts).tolist():
            position = self.feeds[index].position
            position.row += int(counts[index])
            position.tokens += int(sums[index])

    def _at_hand(self, dataset: int, wanted: int, more: int) -> _AtHand:
        feed = self.feeds[dataset]
        block, row = feed.block(), feed.position.row
        if block is None:
            return _AtHand(dataset, None, row, np.zeros(1, dtype=np.int64))
        pairs = block.pairs
        stop = int(np.searchsorted(pairs, pairs[row] + wanted)) + more
        return _AtHand(dataset, block, row, pairs[row : stop + 1] - pairs[row])

    def _chosen(self, at_hand: list[_AtHand], source: WorkSource) -> tuple[list[_AtHand], int]:
        """The dataset that ``source`` draws from next, and how many documents it draws there."""
        tokens = [feed.position.tokens for feed in self.feeds]
        known = {x.dataset: x for x in at_hand}
        available = [i in known and known[i].block is not None for i in range(len(self.feeds))]
        if not any(available):
            return at_hand[:1], 0
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
        return [known[first]], count

    def _merged(self, at_hand: list[_AtHand], wanted: int, weights: list[int]) -> np.ndarray:
        """In which order the documents at hand, of all datasets in a row, are drawn: int64 [n].

        Of each dataset there is an entry for every document and one for its end.
        """
        sizes = [len(x.pairs) for x in at_hand]
        owner = np.repeat(np.arange(len(at_hand)), sizes)
        before = [self.feeds[x.dataset].position.tokens - self.base[x.dataset] for x in at_hand]
        pairs = np.concatenate([x.pairs for x in at_hand])
        weight = np.array(weights, dtype=np.int64)[owner]
        # Quotients are compared as their whole parts and, digit by digit, their fractions: two
        # fractions with denominators up to w differ by 1 / w**2 or more, so twice the bits of the
        # largest weight make the comparison exact.
        quotient, rest = np.divmod(pairs + np.array(before, dtype=np.int64)[owner], weight)
        keys = [quotient]
        for _ in range(-(-(2 * max(weights).bit_length() + 1) // _DIGIT_BITS)):
            quotient, rest = np.divmod(rest << _DIGIT_BITS, weight)
            keys.append(quotient)
        # The sort is stable and the datasets are laid out in recipe order: ties go to the earlier.
        order = np.lexsort(keys[::-1])
        # The last entry of each dataset stands for a document not at hand yet, or for its end: from
        # the first such entry on, nothing can be decided.
        last = np.zeros(len(pairs), dtype=bool)
        last[np.cumsum(sizes) - 1] = True
        order = order[: int(np.argmax(last[order]))]
        drawn = np.cumsum(pairs[order + 1] - pairs[order])
        return order[: int(np.searchsorted(drawn, wanted)) + 1]


def _gather(at_hand: list[_AtHand], order: np.ndarray) -> Documents:
    """The documents at hand, of all datasets in a row, in some order of them."""
    # Of one dataset, as in most runs, it is a stretch of the block as it lies, which costs less.
    if len(at_hand) == 1 and (block := at_hand[0].block) is not None:
        row, count = at_hand[0].row, len(order)
        bounds = block.bounds[row : row + count + 1]
        places = np.empty((count, 4), dtype=np.int64)
        places[:, :3] = at_hand[0].dataset, block.ordinal, block.number
        places[:, 3] = order + row
        return Documents(block.tokens[bounds[0] : bounds[-1]], bounds - bounds[0], places)
    sizes = np.array([len(x.pairs) for x in at_hand])
    owner = np.repeat(np.arange(len(at_hand)), sizes)[order]
    rows = order - (np.cumsum(sizes) - sizes)[owner] + np.array([x.row for x in at_hand])[owner]
    blocks = [x.block for x in at_hand]
    numbers = [(0, 0) if b is None else (b.ordinal, b.number) for b in blocks]
    places = np.empty((len(order), 4), dtype=np.int64)
    places[:, 0] = np.array([x.dataset for x in at_hand])[owner]
    places[:, 1:3] = np.array(numbers)[owner]
    places[:, 3] = rows
    # Documents that lie side by side in their block are taken together.
    begins = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    ends = np.append(begins[1:], len(order))
    tokens, lengths = [], []
    runs = zip(owner[begins].tolist(), rows[begins].tolist(), (ends - begins).tolist(), strict=True)
    for slot, row, count in runs:
        block = blocks[slot]
        assert block is not None
        bounds = block.bounds[row : row + count + 1]
        tokens.append(block.tokens[bounds[0] : bounds[-1]])
        lengths.append(bounds[1:] - bounds[:-1])
    bounds = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=bounds[1:])
    return Documents(tokens[0] if len(tokens) == 1 else np.concatenate(tokens), bounds, places)
