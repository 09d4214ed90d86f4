"""Hashes and permutations: published values, and golden values that pin the stream for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_zephon.order import derive_key, mix64, permute, shuffled

KEYS = st.integers(0, 2**64 - 1)


def test_mix64_gives_the_published_values_of_splitmix64_for_seed_1234567():
    state, values = 1234567, []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        values.append(mix64(state))
    assert values == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_derive_key_gives_the_values_it_gave_in_the_first_release():
    assert derive_key() == 0
    assert derive_key(0) == 6755974106381971767
    assert derive_key(2**64 - 1) == 7136257342804621622
    assert derive_key("chunks") == 6186032782656249759
    assert derive_key("ß\u2028") == 17493774659034988722
    assert derive_key(7, "chunks", "web", 2) == 11896228265001526657


def test_derive_key_tells_apart_parts_that_are_equal_when_joined():
    assert derive_key("ab", "c") == 13137402147452217851
    assert derive_key("a", "bc") == 4823986637587733625


def test_derive_key_tells_apart_order_count_and_kind_of_parts():
    keys = [
        derive_key(1, 2),
        derive_key(2, 1),
        derive_key(1),
        derive_key(1, 0),
        derive_key("1"),
        derive_key(""),
        derive_key("", ""),
        derive_key("a"),
        derive_key("a\0"),
        derive_key(0x61),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("part", [-1, 2**64])
def test_derive_key_refuses_an_integer_outside_64_bits(part):
    with pytest.raises(ValueError, match=f"from 0 to .*, got {part}$"):
        derive_key(1, part)


def test_permute_gives_the_values_it_gave_in_the_first_release():
    assert [permute(i, 10, 42) for i in range(10)] == [7, 6, 4, 9, 8, 2, 1, 3, 0, 5]
    assert [permute(i, 7, 0) for i in range(7)] == [4, 1, 2, 0, 3, 6, 5]
    assert [permute(i, 2, 1) for i in range(2)] == [1, 0]
    assert permute(0, 1, 5) == 0
    assert permute(123456789, 10**12, 2**64 - 1) == 613611800090


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 700), key=KEYS)
def test_permute_visits_every_index_of_a_range_once(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 2**40), key=KEYS, data=st.data())
def test_permute_stays_in_a_large_range_and_keeps_neighbours_apart(size, key, data):
    index = data.draw(st.integers(0, size - 1))
    images = [permute(i, size, key) for i in range(index, min(index + 20, size))]
    assert len(set(images)) == len(images)
    assert all(0 <= image < size for image in images)


@pytest.mark.parametrize("index", [-1, 5, 6])
def test_permute_refuses_an_index_outside_the_range(index):
    with pytest.raises(ValueError, match=rf"in \[0, 5\), got {index}$"):
        permute(index, 5, 1)


def test_permute_sends_each_index_everywhere_equally_often_over_many_keys():
    size, keys = 6, 6000
    counts = np.zeros((size, size), dtype=int)
    for key in range(keys):
        for index in range(size):
            counts[index, permute(index, size, derive_key(key))] += 1
    # 1000 are expected in each cell, standard deviation 29; five of them is 1 in 50,000 cells.
    assert np.abs(counts - keys / size).max() < 5 * 29


def test_shuffled_gives_the_values_it_gave_in_the_first_release():
    assert shuffled(10, 42).tolist() == [4, 1, 6, 2, 8, 3, 9, 0, 7, 5]
    assert shuffled(7, 2**64 - 1).tolist() == [2, 3, 4, 5, 0, 1, 6]
    assert shuffled(1, 9).tolist() == [0]
    assert shuffled(0, 9).tolist() == []


@settings(deadline=None, max_examples=100)
@given(size=st.integers(0, 3000), key=KEYS)
def test_shuffled_is_a_permutation_sorted_by_splitmix64_of_the_key(size, key):
    order = shuffled(size, key)
    assert order.dtype == np.int64
    hashes = [mix64((key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in order.tolist()]
    assert sorted(order.tolist()) == list(range(size))
    assert hashes == sorted(hashes)
