"""Shuffling: how long a segment is, and in which order its sequences go out."""

import pytest

from torchtitan_zephon.ops.shuffle import emission_order, segment_rows
from torchtitan_zephon.recipe import ShuffleConfig


@pytest.mark.parametrize(
    ("buffer_size", "lanes", "rows"),
    [
        (1000, 1, 1000),
        (1000, 64, 16),
        (1000, 7, 143),
        (1, 64, 1),
        (64, 64, 1),
        (0, 1, 16),
        (0, 64, 16),
    ],
)
def test_a_segment_is_the_lanes_part_of_the_job_wide_buffer(buffer_size, lanes, rows):
    assert segment_rows(ShuffleConfig(buffer_size=buffer_size), lanes) == rows


def test_the_order_is_the_one_it_was_in_the_first_release():
    config = ShuffleConfig(buffer_size=8)
    assert emission_order(config, 7, 0, 0, 8).tolist() == [4, 1, 5, 2, 6, 7, 3, 0]
    assert emission_order(config, 7, 3, 12, 8).tolist() == [0, 5, 6, 7, 2, 1, 3, 4]


def test_the_order_has_every_row_once_and_another_order_for_each_seed_lane_and_segment():
    config = ShuffleConfig(buffer_size=500)
    orders = [
        emission_order(config, seed, lane, segment, 50).tolist()
        for seed, lane, segment in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5


def test_a_short_last_segment_is_shuffled_too():
    config = ShuffleConfig(buffer_size=500)
    assert sorted(emission_order(config, 3, 0, 9, 5).tolist()) == [0, 1, 2, 3, 4]
    assert emission_order(config, 3, 0, 9, 0).tolist() == []


def test_without_a_buffer_rows_go_out_in_order():
    assert emission_order(ShuffleConfig(buffer_size=0), 3, 2, 1, 5).tolist() == [0, 1, 2, 3, 4]
