"""``wrap``: documents end to end, cut into rows; nothing dropped, nothing padded but the end."""

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.packing import (
    NO,
    PAD,
    Corpus,
    assert_equal_rows,
    assert_pieces_rebuild,
    assert_rows,
    documents,
    pairs_of,
)
from torchtitan_zephon.ops import wrap
from torchtitan_zephon.ops.documents import Reference
from torchtitan_zephon.ops.wrap import Wrap

A, B, C, D, E, F = b"abcdef"


def test_documents_without_eos_are_still_separate():
    rows = Corpus([[1, 2], [3, 4, 9]]).segment(Wrap(3, PAD), 1)
    assert_rows(rows, [[1, 3, 4]], [[2, 4, 9]], [[0, 0, 1]])
    assert rows.pieces.tolist() == [
        # row, column, dataset, ordinal, block, document, start, stop
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 1, 0, 0, 0, 1, 0, 2],
    ]


def test_no_label_crosses_from_one_document_to_the_next():
    rows = Corpus([[A, B], [C, D]]).segment(Wrap(2, PAD), 1)
    assert_rows(rows, [[A, C]], [[B, D]], [[0, 0]])
    rows = Corpus([[A, B, C], [D, E, F]]).segment(Wrap(4, PAD), 1)
    assert_rows(rows, [[A, B, D, E]], [[B, C, E, F]], [[0, 1, 0, 1]])


def test_documents_of_10_and_3_tokens_fill_rows_of_4_and_every_pair_comes_out_once():
    corpus = Corpus([list(range(10, 20)), [20, 21, 22]])
    rows = corpus.segment(Wrap(4, PAD), 3)
    assert_rows(
        rows,
        [[10, 11, 12, 13], [14, 15, 16, 17], [18, 20, 21, PAD]],
        [[11, 12, 13, 14], [15, 16, 17, 18], [19, 21, 22, NO]],
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 0]],
        padding=1,
    )
    assert rows.pieces.tolist() == [
        [0, 0, 0, 0, 0, 0, 0, 4],
        [1, 0, 0, 0, 0, 0, 4, 8],
        [2, 0, 0, 0, 0, 0, 8, 9],
        [2, 1, 0, 0, 0, 1, 0, 2],
    ]


def test_the_tail_of_a_document_begins_the_next_segment():
    corpus, packer = Corpus([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]), Wrap(3, PAD)
    assert_rows(corpus.segment(packer, 1), [[1, 2, 4]], [[2, 3, 5]], [[0, 1, 0]])
    assert packer.flush() == [[Reference(0, 0, 0, 1, 1, 4)]]
    assert_rows(corpus.segment(packer, 1), [[5, 6, 7]], [[6, 7, 8]], [[0, 1, 2]])
    assert packer.flush() == []
    last = corpus.segment(packer, 1)
    assert_rows(last, [[9, PAD, PAD]], [[10, NO, NO]], [[0, 0, 1]], padding=2)
    assert packer.flush() == []


def test_a_document_longer_than_several_segments_goes_through_them_all():
    corpus, packer = Corpus([list(range(12)), [50, 51]]), Wrap(2, PAD)
    made = [corpus.segment(packer, 2) for _ in range(3)]
    assert [r.sequences[0].tolist() for r in made] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], [10, 50]],
    ]
    assert [r.sequences[1].tolist() for r in made] == [
        [[1, 2], [3, 4]],
        [[5, 6], [7, 8]],
        [[9, 10], [11, 51]],
    ]
    assert made[1].pieces.tolist() == [[0, 0, 0, 0, 0, 0, 4, 6], [1, 0, 0, 0, 0, 0, 6, 8]]
    assert made[2].pieces.tolist() == [
        [0, 0, 0, 0, 0, 0, 8, 10],
        [1, 0, 0, 0, 0, 0, 10, 11],
        [1, 1, 0, 0, 0, 1, 0, 1],
    ]


def test_a_document_that_ends_with_its_row_leaves_no_tail():
    corpus, packer = Corpus([[1, 2, 3], [4, 5, 6]]), Wrap(2, PAD)
    assert_rows(corpus.segment(packer, 2), [[1, 2], [4, 5]], [[2, 3], [5, 6]], [[0, 1], [0, 1]])
    assert packer.flush() == []


def test_where_the_data_ends_only_rows_with_tokens_are_made():
    corpus, packer = Corpus([[1, 2, 3]]), Wrap(2, PAD)
    assert_rows(corpus.segment(packer, 5), [[1, 2]], [[2, 3]], [[0, 1]])
    empty = corpus.segment(packer, 5)
    assert_rows(empty, [], [], [])
    assert empty.pieces.shape == (0, 8)


def test_push_takes_no_more_documents_than_the_segment_has_room_for():
    packer = Wrap(2, PAD)
    packer.begin(2)
    assert packer.wanted() == 4
    assert packer.push(documents([[1, 2], [3, 4]])) == 2
    assert (packer.wanted(), packer.full) == (2, False)
    assert packer.push(documents([[5, 6], [7, 8, 9], [10, 11]], 2)) == 2
    assert packer.full
    assert packer.take().sequences[0].tolist() == [[1, 3], [5, 7]]
    assert packer.flush() == [[Reference(0, 0, 0, 3, 1, 2)]]


CORPORA = st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=17), max_size=25)


@settings(deadline=None, max_examples=150)
@given(
    tokens=CORPORA,
    seq_len=st.integers(1, 7),
    rows=st.integers(1, 5),
    window=st.integers(1, 6),
    long=st.sampled_from([0, 4, 256]),
)
def test_rows_are_all_pairs_in_order_and_restoring_equals_going_on(
    tokens, seq_len, rows, window, long
):
    # Long documents go another way than short ones, on average over a window.
    with mock.patch.object(wrap, "_LONG", long):
        check_rows(tokens, seq_len, rows, window)


def check_rows(tokens, seq_len, rows, window):
    corpus, packer = Corpus(tokens, window), Wrap(seq_len, PAD)
    made = []
    for _ in range(200):
        restored = Wrap(seq_len, PAD)
        restored.restore(corpus.read(packer.flush()))
        fresh = Corpus(tokens, window + 1, corpus.at).segment(restored, rows)
        made.append(corpus.segment(packer, rows))
        assert_equal_rows(fresh, made[-1])
        assert restored.flush() == packer.flush()
        assert_pieces_rebuild(made[-1], tokens)
        if len(made[-1]) < rows:
            break
    pairs = [(d, p) for d, document in enumerate(tokens) for p in range(len(document) - 1)]
    flat = [x for segment in made for x in segment.sequences[0].ravel().tolist()]
    expected = [tokens[d][p] for d, p in pairs]
    padding = -len(pairs) % seq_len
    assert flat == expected + [PAD] * padding
    assert pairs_of(made) == pairs
    assert sum(segment.padding for segment in made) == padding
