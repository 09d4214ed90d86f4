"""The mixture: always the dataset with the smallest tokens / weight, in exact arithmetic."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_zephon.ops.mix import Mixture, Phase
from torchtitan_zephon.sources.feed import Block, Position


class FakeFeed:
    """A dataset given by the pairs of its documents, block by block; it may repeat for ever."""

    def __init__(self, blocks: list[list[int]], tokens: int = 0, repeat: bool = False):
        self.blocks, self.repeat = blocks, repeat
        self.position = Position(tokens=tokens)

    def block(self) -> Block | None:
        at = self.position
        while self.repeat or at.ordinal < len(self.blocks):
            pairs = self.blocks[at.ordinal % len(self.blocks)]
            if at.row < len(pairs):
                bounds = np.cumsum([0, *(p + 1 for p in pairs)], dtype=np.int64)
                return Block(at.ordinal, 0, np.arange(bounds[-1], dtype=np.int32), bounds, 0)
            at.ordinal, at.row = at.ordinal + 1, 0
        return None


def mixture(feeds: list[FakeFeed], weights: list[int]) -> Mixture:
    return Mixture(feeds, (Phase(0, tuple(weights)),))  # pyrefly: ignore[bad-argument-type]


def draw(mix: Mixture, count: int, wanted: int = 10, used: int = 10**9) -> list[tuple[int, int]]:
    """(dataset, pairs) of the next documents, at most ``used`` taken of each window."""
    out: list[tuple[int, int]] = []
    while len(out) < count and (window := mix.window(wanted)) is not None:
        taken = min(used, len(window), count - len(out))
        pairs = np.diff(window.bounds[: taken + 1]) - 1
        out += zip(window.places[:taken, 0].tolist(), pairs.tolist(), strict=True)
        mix.advance(window, taken)
    return out


def brute_force(
    lengths: list[list[int]], weights: list[int], tokens: list[int]
) -> list[tuple[int, int, int]]:
    """(dataset, number of the document, pairs) in the order of the rule, one by one."""
    tokens, at, out = list(tokens), [0] * len(lengths), []
    while True:
        left = [d for d in range(len(lengths)) if at[d] < len(lengths[d])]
        if not left:
            return out
        d = min(left, key=lambda d: (Fraction(tokens[d], weights[d]), d))
        out.append((d, at[d], lengths[d][at[d]]))
        tokens[d] += lengths[d][at[d]]
        at[d] += 1


def test_equal_weights_and_lengths_take_turns_in_recipe_order():
    mix = mixture([FakeFeed([[5, 5, 5]]), FakeFeed([[5, 5, 5]])], [1, 1])
    assert [d for d, _ in draw(mix, 6)] == [0, 1, 0, 1, 0, 1]


def test_weights_7_2_1_with_documents_of_one_length():
    mix = mixture([FakeFeed([[1]], repeat=True) for _ in range(3)], [7, 2, 1])
    order = [d for d, _ in draw(mix, 20)]
    # Quotients before each draw: n / 7, n / 2, n / 1 for the n-th document of each dataset.
    assert order == [0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0, 0, 0]


def test_a_document_is_drawn_from_the_smallest_share_so_far():
    mix = mixture([FakeFeed([[10, 1, 1]]), FakeFeed([[3, 3, 3, 3, 3]])], [1, 1])
    assert draw(mix, 8) == [
        (0, 10),
        (1, 3),
        (1, 3),
        (1, 3),
        (1, 3),
        (0, 1),
        (0, 1),
        (1, 3),
    ]


def test_a_window_names_the_documents_and_their_places():
    mix = mixture([FakeFeed([[2], [1, 1]]), FakeFeed([[1, 2]])], [1, 1])
    window = mix.window(100)
    assert window is not None
    # The next document of the first dataset is in its next block, so nothing after it is decided.
    assert window.places.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1]]
    assert window.bounds.tolist() == [0, 3, 5, 8]
    assert window.tokens.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    mix.advance(window, 3)
    window = mix.window(100)
    assert window is not None
    assert window.places.tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]


def test_a_window_of_one_dataset_holds_about_what_is_wanted_and_at_least_one_document():
    mix = mixture([FakeFeed([[3, 3, 3, 3], [50]])], [1])
    assert [len(w) for w in [mix.window(1), mix.window(3), mix.window(4), mix.window(99)] if w] == [
        1,
        1,
        2,
        4,
    ]


def test_an_advance_moves_the_positions_and_the_token_counts():
    feeds = [FakeFeed([[2, 3]]), FakeFeed([[4, 1]])]
    mix = mixture(feeds, [1, 1])
    draw(mix, 3, used=1)
    assert [(f.position.row, f.position.tokens) for f in feeds] == [(2, 5), (1, 4)]


BLOCKS = st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=4)
WEIGHTS = st.one_of(st.integers(1, 9), st.integers(10**8, 10**9), st.integers(1, 2**40 - 1))


@settings(deadline=None, max_examples=200)
@given(
    datasets=st.lists(
        st.tuples(
            BLOCKS, WEIGHTS, st.one_of(st.just(0), st.integers(0, 100), st.integers(0, 10**13))
        ),
        min_size=1,
        max_size=5,
    ),
    wanted=st.integers(1, 60),
    used=st.integers(1, 20),
)
def test_the_order_of_draws_is_that_of_exact_fractions(datasets, wanted, used):
    blocks, weights, tokens = map(list, zip(*datasets, strict=True))
    feeds: list[Any] = [FakeFeed(b, t) for b, t in zip(blocks, tokens, strict=True)]
    lengths = [list(itertools.chain(*b)) for b in blocks]
    mix = mixture(feeds, weights)
    expected = brute_force(lengths, weights, tokens)
    assert draw(mix, 10**9, wanted, used) == [(d, pairs) for d, _, pairs in expected]
    assert mix.window(wanted) is None
    assert [f.position.tokens for f in feeds] == [
        t + sum(n) for t, n in zip(tokens, lengths, strict=True)
    ]


@settings(deadline=None, max_examples=100)
@given(base=st.integers(1, 2**40 - 2), rest=st.integers(0, 2**20), factor=st.integers(1, 2**20))
def test_quotients_that_differ_in_the_last_bit_only_are_told_apart(base, rest, factor):
    # a / w and (a + 1) / (w + 1) are as close as fractions of such weights can be.
    tokens, weights = [base * factor + rest, (base + 1) * factor + rest], [base, base + 1]
    feeds = [FakeFeed([[1]], t) for t in tokens]
    expected = brute_force([[1], [1]], weights, tokens)
    assert draw(mixture(feeds, weights), 9) == [(d, pairs) for d, _, pairs in expected]
    feeds = [FakeFeed([[1]], t) for t in reversed(tokens)]
    expected = brute_force([[1], [1]], weights[::-1], tokens[::-1])
    assert draw(mixture(feeds, weights[::-1]), 9) == [(d, pairs) for d, _, pairs in expected]


@settings(deadline=None, max_examples=40)
@given(
    datasets=st.lists(st.tuples(BLOCKS, st.integers(1, 1000)), min_size=2, max_size=4).filter(
        lambda datasets: all(any(blocks) for blocks, _ in datasets)
    ),
    wanted=st.integers(1, 60),
)
def test_shares_are_within_one_document_of_the_weights_at_every_moment(datasets, wanted):
    feeds = [FakeFeed(blocks, repeat=True) for blocks, _ in datasets]
    weights = [weight for _, weight in datasets]
    longest = [max(itertools.chain(*blocks)) for blocks, _ in datasets]
    tokens = [0] * len(feeds)
    for d, pairs in draw(mixture(feeds, weights), 200, wanted):
        tokens[d] += pairs
        shares = [Fraction(t, w) for t, w in zip(tokens, weights, strict=True)]
        for share, most, weight in zip(shares, longest, weights, strict=True):
            assert share - min(shares) <= Fraction(most, weight)


def test_documents_of_400_and_4000_tokens_at_1_to_1_share_every_window_of_100k_evenly():
    feeds = [FakeFeed([[400] * 50], repeat=True), FakeFeed([[4000] * 50], repeat=True)]
    owner = np.concatenate(
        [np.full(pairs, d, dtype=np.int8) for d, pairs in draw(mixture(feeds, [1, 1]), 1500, 2048)]
    )[:1_000_000]
    assert len(owner) == 1_000_000
    assert abs(owner.mean() - 0.5) <= 0.01
    sums = np.concatenate([[0], np.cumsum(owner, dtype=np.int64)])
    windows = (sums[100_000:] - sums[:-100_000]) / 100_000
    assert np.abs(windows - 0.5).max() <= 0.05


def test_a_dataset_of_5_documents_beside_one_of_50000_repeats_and_starves_nobody():
    small, large = FakeFeed([[7, 9, 11, 13, 2]], repeat=True), FakeFeed([[40] * 500] * 100)
    drawn = draw(mixture([small, large], [1, 1]), 20_000, 2048)
    tokens = [sum(pairs for d, pairs in drawn if d == dataset) for dataset in (0, 1)]
    assert abs(tokens[0] - tokens[1]) <= 40
    assert small.position.ordinal > 1000
