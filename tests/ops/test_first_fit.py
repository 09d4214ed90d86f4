"""``first_fit``: documents whole, in the oldest open row with room; padding counted."""

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
from torchtitan_zephon.ops.documents import Reference
from torchtitan_zephon.ops.first_fit import FirstFit


def pairs(*counts: int) -> list[list[int]]:
    """Documents with these numbers of pairs; document ``i`` holds ``10 * i, 10 * i + 1, ...``."""
    return [[10 * i + j for j in range(count + 1)] for i, count in enumerate(counts)]


def layout(corpus: Corpus, packer: FirstFit, rows: int) -> list[list[tuple[int, int]]]:
    """For each row of a segment its pieces, as (document, pairs)."""
    made = corpus.segment(packer, rows)
    assert_pieces_rebuild(made, corpus.tokens)
    out: list[list[tuple[int, int]]] = [[] for _ in range(len(made.inputs))]
    for row, _, _, _, _, document, start, stop in made.pieces.tolist():
        out[row].append((document, stop - start))
    return out


def test_two_documents_of_3_pairs_share_a_row_of_8_and_the_third_is_padded():
    rows = Corpus(pairs(3, 3, 3)).segment(FirstFit(8, PAD, 1), 5)
    assert_rows(
        rows,
        [[0, 1, 2, 10, 11, 12, PAD, PAD], [20, 21, 22, PAD, PAD, PAD, PAD, PAD]],
        [[1, 2, 3, 11, 12, 13, NO, NO], [21, 22, 23, NO, NO, NO, NO, NO]],
        [[0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4]],
        padding=7,
    )
    assert rows.pieces.tolist() == [
        # row, column, dataset, ordinal, block, document, start, stop
        [0, 0, 0, 0, 0, 0, 0, 3],
        [0, 3, 0, 0, 0, 1, 0, 3],
        [1, 0, 0, 0, 0, 2, 0, 3],
    ]


def test_a_document_goes_to_the_oldest_row_with_room():
    # Rows open with 5, 4 and 3 of 6; the document of 2 fits the second and third, not the first.
    assert layout(Corpus(pairs(5, 4, 3, 2, 1)), FirstFit(6, PAD, 3), 5) == [
        [(1, 4), (3, 2)],
        [(0, 5), (4, 1)],
        [(2, 3)],
    ]


def test_a_full_row_is_finished_at_once():
    packer = FirstFit(4, PAD, 8)
    packer.begin(3)
    assert packer.push(documents(pairs(3, 4, 1, 2))) == 4
    assert packer.wanted() == 4
    assert not packer.full
    packer.close()
    assert packer.take().inputs.tolist() == [
        [10, 11, 12, 13],
        [0, 1, 2, 20],
        [30, 31, PAD, PAD],
    ]


def test_when_nothing_fits_the_fullest_row_is_finished_and_the_oldest_on_a_tie():
    packer = FirstFit(6, PAD, 3)
    assert layout(Corpus(pairs(3, 4, 4, 5)), packer, 1) == [[(1, 4)]]
    assert packer.flush() == [
        [],
        [Reference(0, 0, 0, 0, 0, 3)],
        [Reference(0, 0, 0, 2, 0, 4)],
        [Reference(0, 0, 0, 3, 0, 5)],
    ]


def test_open_rows_go_on_in_the_next_segment():
    corpus, packer = Corpus(pairs(3, 5, 5, 1, 3), window=1), FirstFit(6, PAD, 2)
    assert layout(corpus, packer, 1) == [[(1, 5)]]
    assert corpus.at == 3
    assert layout(corpus, packer, 1) == [[(2, 5)]]
    assert layout(corpus, packer, 1) == [[(0, 3), (3, 1)]]
    assert layout(corpus, packer, 1) == [[(4, 3)]]


def test_a_document_longer_than_a_row_fills_rows_of_its_own_and_its_rest_looks_for_room():
    corpus = Corpus(pairs(2, 10, 1))
    assert layout(corpus, FirstFit(4, PAD, 4), 9) == [
        [(1, 4)],
        [(1, 4)],
        [(0, 2), (1, 2)],
        [(2, 1)],
    ]


def test_a_document_of_exactly_some_rows_leaves_no_rest():
    packer = FirstFit(4, PAD, 4)
    assert layout(Corpus(pairs(8)), packer, 9) == [[(0, 4)], [(0, 4)]]
    assert packer.flush() == []


def test_a_long_document_over_the_end_of_a_segment_goes_on_in_the_next():
    corpus, packer = Corpus(pairs(1, 11)), FirstFit(4, PAD, 4)
    assert layout(corpus, packer, 1) == [[(1, 4)]]
    assert packer.flush() == [[Reference(0, 0, 0, 1, 4, 11)], [Reference(0, 0, 0, 0, 0, 1)]]
    assert layout(corpus, packer, 1) == [[(1, 4)]]
    assert packer.flush() == [[Reference(0, 0, 0, 1, 8, 11)], [Reference(0, 0, 0, 0, 0, 1)]]
    assert layout(corpus, packer, 1) == [[(0, 1), (1, 3)]]
    assert packer.flush() == []
    assert layout(corpus, packer, 1) == []


def test_the_end_of_the_data_finishes_the_open_rows_oldest_first_segment_by_segment():
    corpus, packer = Corpus(pairs(2, 3, 2)), FirstFit(4, PAD, 4)
    assert layout(corpus, packer, 1) == [[(0, 2), (2, 2)]]
    assert layout(corpus, packer, 1) == [[(1, 3)]]
    assert layout(corpus, packer, 1) == []
    corpus, packer = Corpus(pairs(3, 2, 3)), FirstFit(4, PAD, 4)
    assert layout(corpus, packer, 2) == [[(0, 3)], [(1, 2)]]
    assert packer.flush() == [[], [Reference(0, 0, 0, 2, 0, 3)]]
    assert layout(corpus, packer, 2) == [[(2, 3)]]


CORPORA = st.lists(st.integers(1, 20), max_size=40)


@settings(deadline=None, max_examples=150)
@given(
    counts=CORPORA,
    seq_len=st.integers(1, 9),
    open_bins=st.integers(1, 5),
    rows=st.integers(1, 4),
    window=st.integers(1, 6),
)
def test_every_pair_comes_out_once_and_restoring_equals_going_on(
    counts, seq_len, open_bins, rows, window
):
    tokens = pairs(*counts)
    corpus, packer = Corpus(tokens, window), FirstFit(seq_len, PAD, open_bins)
    made = []
    for _ in range(1000):
        restored = FirstFit(seq_len, PAD, open_bins)
        restored.restore(corpus.read(packer.flush()))
        fresh = Corpus(tokens, window + 1, corpus.at).segment(restored, rows)
        made.append(corpus.segment(packer, rows))
        assert_equal_rows(fresh, made[-1])
        assert restored.flush() == packer.flush()
        assert_pieces_rebuild(made[-1], tokens)
        assert len(packer.flush()) <= open_bins + 1
        if len(made[-1].inputs) < rows:
            break
    assert packer.flush() == []
    assert pairs_of(made) == [(d, p) for d, count in enumerate(counts) for p in range(count)]
    whole = {d for rows in made for *_, d, a, b in rows.pieces.tolist() if b - a == counts[d]}
    assert {d for d, count in enumerate(counts) if count <= seq_len} <= whole
    places = sum(segment.inputs.size for segment in made)
    assert sum(segment.padding for segment in made) == places - sum(counts)
