"""Shuffling: how long a segment is, and in which order its sequences go out."""

import pytest

from torchtitan_zephon.ops.shuffle import emission_order, segment_rows, shuffled_rows


@pytest.mark.parametrize(
    ("buffer_size", "lanes", "rows"),
    [
        (1000, 1, 1000),
        (1000, 64, 16),
        (1000, 7, 143),
        (1, 64, 1),
        (64, 64, 1),
        (0, 1, 1),
        (0, 64, 1),
    ],
)
def test_a_lane_shuffles_its_part_of_the_job_wide_buffer(buffer_size, lanes, rows):
    assert shuffled_rows(buffer_size, lanes) == rows


@pytest.mark.parametrize(
    ("buffer_size", "lanes", "rows"),
    [(1000, 1, 1000), (1000, 64, 16), (1000, 128, 16), (1000, 100, 20), (1, 64, 16), (0, 1, 16)],
)
def test_a_segment_is_what_is_shuffled_as_often_as_it_takes_to_be_16_rows(buffer_size, lanes, rows):
    assert segment_rows(shuffled_rows(buffer_size, lanes)) == rows


def test_the_order_is_the_one_it_was_in_the_first_release():
    assert emission_order(7, 0, 0, 8, 8).tolist() == [4, 1, 5, 2, 6, 7, 3, 0]
    assert emission_order(7, 3, 96, 8, 8).tolist() == [0, 5, 6, 7, 2, 1, 3, 4]


def test_rows_stay_in_their_group_however_many_groups_a_segment_has():
    order = emission_order(7, 3, 88, 21, 8).tolist()
    assert order[8:16] == [8 + i for i in [0, 5, 6, 7, 2, 1, 3, 4]]
    assert sorted(order[:8]) == list(range(8))
    assert sorted(order[16:]) == [16, 17, 18, 19, 20]


def test_the_order_has_every_row_once_and_another_order_for_each_seed_lane_and_group():
    orders = [
        emission_order(seed, lane, first, 50, 50).tolist()
        for seed, lane, first in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 50), (0, 1, 50)]
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5


def test_without_a_buffer_rows_go_out_in_order():
    assert emission_order(3, 2, 16, 5, 1).tolist() == [0, 1, 2, 3, 4]
    assert emission_order(3, 2, 16, 0, 4).tolist() == []
