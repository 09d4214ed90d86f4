"""Open rows: to which a document goes, when they are finished, what waits and what is dropped."""

from typing import Any

import numpy as np
import pytest
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
from torchtitan_zephon.ops.bins import Bins, groups_of
from torchtitan_zephon.ops.documents import Documents, Reference, Rows
from torchtitan_zephon.ops.wrap import Wrap
from torchtitan_zephon.recipe import DatasetConfig, PackingConfig


def bins(
    algorithm: Any,
    seq_len: int,
    open_bins: int = 1,
    groups: tuple[int, ...] = (0,),
    **settings: Any,
) -> Bins:
    config = PackingConfig(algorithm=algorithm, open_bins=open_bins, **settings)
    return Bins(config, seq_len, PAD, list(groups))


def first_fit(seq_len: int, open_bins: int) -> Bins:
    return bins("first_fit", seq_len, open_bins)


def pairs(*counts: int) -> list[list[int]]:
    """Documents with these numbers of pairs; document ``i`` holds ``10 * i, 10 * i + 1, ...``."""
    return [[10 * i + j for j in range(count + 1)] for i, count in enumerate(counts)]


def layout(corpus: Corpus, packer: Bins, rows: int) -> list[list[tuple[int, int]]]:
    """For each row of a segment its pieces, as (document, pairs)."""
    made = corpus.segment(packer, rows)
    assert_pieces_rebuild(made, corpus.tokens)
    out: list[list[tuple[int, int]]] = [[] for _ in range(len(made))]
    for row, _, _, _, _, document, start, stop in made.pieces.tolist():
        out[row].append((document, stop - start))
    return out


def test_two_documents_of_3_pairs_share_a_row_of_8_and_the_third_is_padded():
    rows = Corpus(pairs(3, 3, 3)).segment(first_fit(8, 1), 5)
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
    assert layout(Corpus(pairs(5, 4, 3, 2, 1)), first_fit(6, 3), 5) == [
        [(1, 4), (3, 2)],
        [(0, 5), (4, 1)],
        [(2, 3)],
    ]


def test_a_full_row_is_finished_at_once():
    packer = first_fit(4, 8)
    packer.begin(3)
    assert packer.push(documents(pairs(3, 4, 1, 2))) == 4
    assert packer.wanted() == 4
    assert not packer.full
    packer.close()
    assert packer.take().sequences[0].tolist() == [
        [10, 11, 12, 13],
        [0, 1, 2, 20],
        [30, 31, PAD, PAD],
    ]


def test_when_nothing_fits_the_fullest_row_is_finished_and_the_oldest_on_a_tie():
    packer = first_fit(6, 3)
    assert layout(Corpus(pairs(3, 4, 4, 5)), packer, 1) == [[(1, 4)]]
    assert packer.flush() == [
        [],
        [Reference(0, 0, 0, 0, 0, 3)],
        [Reference(0, 0, 0, 2, 0, 4)],
        [Reference(0, 0, 0, 3, 0, 5)],
    ]


def test_open_rows_go_on_in_the_next_segment():
    corpus, packer = Corpus(pairs(3, 5, 5, 1, 3), window=1), first_fit(6, 2)
    assert layout(corpus, packer, 1) == [[(1, 5)]]
    assert corpus.at == 3
    assert layout(corpus, packer, 1) == [[(2, 5)]]
    assert layout(corpus, packer, 1) == [[(0, 3), (3, 1)]]
    assert layout(corpus, packer, 1) == [[(4, 3)]]


def test_a_document_longer_than_a_row_fills_rows_of_its_own_and_its_rest_looks_for_room():
    corpus = Corpus(pairs(2, 10, 1))
    assert layout(corpus, first_fit(4, 4), 9) == [
        [(1, 4)],
        [(1, 4)],
        [(0, 2), (1, 2)],
        [(2, 1)],
    ]


def test_a_document_of_exactly_some_rows_leaves_no_rest():
    packer = first_fit(4, 4)
    assert layout(Corpus(pairs(8)), packer, 9) == [[(0, 4)], [(0, 4)]]
    assert packer.flush() == []


def test_a_long_document_over_the_end_of_a_segment_goes_on_in_the_next():
    corpus, packer = Corpus(pairs(1, 11)), first_fit(4, 4)
    assert layout(corpus, packer, 1) == [[(1, 4)]]
    assert packer.flush() == [[Reference(0, 0, 0, 1, 4, 11)], [Reference(0, 0, 0, 0, 0, 1)]]
    assert layout(corpus, packer, 1) == [[(1, 4)]]
    assert packer.flush() == [[Reference(0, 0, 0, 1, 8, 11)], [Reference(0, 0, 0, 0, 0, 1)]]
    assert layout(corpus, packer, 1) == [[(0, 1), (1, 3)]]
    assert packer.flush() == []
    assert layout(corpus, packer, 1) == []


def test_the_end_of_the_data_finishes_the_open_rows_oldest_first_segment_by_segment():
    corpus, packer = Corpus(pairs(2, 3, 2)), first_fit(4, 4)
    assert layout(corpus, packer, 1) == [[(0, 2), (2, 2)]]
    assert layout(corpus, packer, 1) == [[(1, 3)]]
    assert layout(corpus, packer, 1) == []
    corpus, packer = Corpus(pairs(3, 2, 3)), first_fit(4, 4)
    assert layout(corpus, packer, 2) == [[(0, 3)], [(1, 2)]]
    assert packer.flush() == [[], [Reference(0, 0, 0, 2, 0, 3)]]
    assert layout(corpus, packer, 2) == [[(2, 3)]]


def test_best_fit_goes_to_the_row_with_the_least_room_that_still_holds_the_document():
    # Rows open with 5, 3 and 4 of 6; first_fit would have put the document of 2 in the second.
    assert layout(Corpus(pairs(5, 3, 4, 2, 1)), bins("best_fit", 6, 3), 5) == [
        [(2, 4), (3, 2)],
        [(0, 5), (4, 1)],
        [(1, 3)],
    ]
    assert layout(Corpus(pairs(5, 3, 4, 2, 1)), first_fit(6, 3), 5) == [
        [(0, 5), (4, 1)],
        [(1, 3), (3, 2)],
        [(2, 4)],
    ]


def test_best_fit_goes_to_the_oldest_of_rows_with_the_same_room():
    assert layout(Corpus(pairs(4, 4, 4, 1)), bins("best_fit", 6, 3), 5) == [
        [(0, 4), (3, 1)],
        [(1, 4)],
        [(2, 4)],
    ]


def test_best_fit_finishes_the_fullest_row_when_nothing_fits_and_the_oldest_on_a_tie():
    packer = bins("best_fit", 6, 3)
    assert layout(Corpus(pairs(3, 4, 4, 5)), packer, 1) == [[(1, 4)]]
    assert packer.flush() == [
        [],
        [Reference(0, 0, 0, 0, 0, 3)],
        [Reference(0, 0, 0, 2, 0, 4)],
        [Reference(0, 0, 0, 3, 0, 5)],
    ]


def test_best_fit_wrap_keeps_documents_whole_while_they_fit_or_a_row_may_be_opened():
    assert layout(Corpus(pairs(5, 3, 4, 2, 3, 1)), bins("best_fit_wrap", 6, 3), 5) == [
        [(2, 4), (3, 2)],
        [(1, 3), (4, 3)],
        [(0, 5), (5, 1)],
    ]


def test_best_fit_wrap_finishes_the_fullest_row_with_the_head_of_a_document_that_fits_nowhere():
    corpus = Corpus(pairs(3, 4, 5, 3))
    rows = corpus.segment(bins("best_fit_wrap", 6, 2), 3)
    assert_rows(
        rows,
        [[10, 11, 12, 13, 20, 21], [0, 1, 2, 22, 23, 24], [30, 31, 32, PAD, PAD, PAD]],
        [[11, 12, 13, 14, 21, 22], [1, 2, 3, 23, 24, 25], [31, 32, 33, NO, NO, NO]],
        [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]],
        padding=3,
    )
    assert rows.pieces.tolist() == [
        [0, 0, 0, 0, 0, 1, 0, 4],
        [0, 4, 0, 0, 0, 2, 0, 2],
        [1, 0, 0, 0, 0, 0, 0, 3],
        [1, 3, 0, 0, 0, 2, 2, 5],
        [2, 0, 0, 0, 0, 3, 0, 3],
    ]


def test_best_fit_wrap_divides_a_long_document_in_the_same_manner():
    # While a row may be opened it fills rows of its own; then its head finishes the fullest row.
    assert layout(Corpus(pairs(2, 10)), bins("best_fit_wrap", 4, 2), 9) == [
        [(1, 4)],
        [(1, 4)],
        [(0, 2), (1, 2)],
    ]
    assert layout(Corpus(pairs(2, 3, 9)), bins("best_fit_wrap", 4, 2), 9) == [
        [(1, 3), (2, 1)],
        [(2, 4)],
        [(2, 4)],
        [(0, 2)],
    ]


def test_best_fit_wrap_goes_on_with_a_divided_document_in_the_next_segment():
    corpus, packer = Corpus(pairs(3, 3)), bins("best_fit_wrap", 4, 1)
    assert layout(corpus, packer, 1) == [[(0, 3), (1, 1)]]
    assert packer.flush() == [[Reference(0, 0, 0, 1, 1, 3)]]
    assert layout(corpus, packer, 1) == [[(1, 2)]]
    assert packer.flush() == []


def test_none_gives_each_document_a_row_and_a_long_one_several():
    packer = bins("none", 4)
    assert layout(Corpus(pairs(1, 4, 6, 2)), packer, 9) == [
        [(0, 1)],
        [(1, 4)],
        [(2, 4)],
        [(2, 2)],
        [(3, 2)],
    ]


def test_none_finishes_a_segment_with_its_last_row_and_keeps_nothing_open():
    corpus, packer = Corpus(pairs(1, 2, 3)), bins("none", 4)
    assert layout(corpus, packer, 2) == [[(0, 1)], [(1, 2)]]
    assert packer.flush() == []
    assert corpus.at == 2


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit", "best_fit_wrap"])
def test_a_row_with_max_documents_pieces_is_finished(algorithm: str):
    packer = bins(algorithm, 8, 2, max_documents=2)
    assert layout(Corpus(pairs(1, 2, 3)), packer, 5) == [[(0, 1), (1, 2)], [(2, 3)]]
    packer = bins(algorithm, 8, 2, max_documents=1)
    assert layout(Corpus(pairs(1, 2)), packer, 5) == [[(0, 1)], [(1, 2)]]


def of_datasets(counts: list[int], datasets: list[int]) -> Documents:
    """Documents with these numbers of pairs, of these datasets."""
    made = documents(pairs(*counts))
    made.places[:, 0] = datasets
    return made


def rows_of(packer: Bins, data: Documents, rows: int) -> list[list[tuple[int, int, int]]]:
    """For each row its pieces, as (dataset, document, pairs)."""
    packer.begin(rows)
    packer.push(data)
    packer.close()
    made = packer.take()
    out: list[list[tuple[int, int, int]]] = [[] for _ in range(len(made))]
    for row, _, dataset, _, _, document, start, stop in made.pieces.tolist():
        out[row].append((dataset, document, stop - start))
    return out


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit", "best_fit_wrap"])
def test_a_row_holds_documents_of_one_group_only(algorithm: str):
    data = of_datasets([2, 2, 2, 2], [0, 1, 2, 1])
    assert rows_of(bins(algorithm, 6, 3, groups=(0, 1, 0)), data, 9) == [
        [(0, 0, 2), (2, 2, 2)],
        [(1, 1, 2), (1, 3, 2)],
    ]
    assert rows_of(bins(algorithm, 6, 3, groups=(0, 0, 0)), data, 9) == [
        [(0, 0, 2), (1, 1, 2), (2, 2, 2)],
        [(1, 3, 2)],
    ]


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit", "best_fit_wrap"])
def test_a_group_without_a_row_takes_the_place_of_the_fullest_row_of_any_group(algorithm: str):
    data = of_datasets([2, 4, 4, 3], [0, 1, 2, 3])
    assert rows_of(bins(algorithm, 6, 3, groups=(0, 1, 2, 3)), data, 9) == [
        [(1, 1, 4)],
        [(0, 0, 2)],
        [(2, 2, 4)],
        [(3, 3, 3)],
    ]


def test_groups_are_numbered_in_recipe_order():
    named = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "")]
    datasets = tuple(DatasetConfig(name=name, path="p", group=group) for name, group in named)
    assert groups_of(PackingConfig(homogeneous="off"), datasets) == [0, 0, 0, 0]
    assert groups_of(PackingConfig(homogeneous="full"), datasets) == [0, 1, 2, 3]
    assert groups_of(PackingConfig(homogeneous="group"), datasets) == [0, 1, 0, 2]


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit", "none"])
def test_truncate_keeps_a_row_of_a_long_document_and_counts_the_rest(algorithm: str):
    corpus, packer = Corpus(pairs(10, 4, 5)), bins(algorithm, 4, long_documents="truncate")
    made = corpus.segment(packer, 2)
    assert made.pieces[:, 5:].tolist() == [[0, 0, 4], [1, 0, 4]]
    assert (made.dropped, packer.flush()) == (6, [])
    made = corpus.segment(packer, 2)
    assert made.pieces[:, 5:].tolist() == [[2, 0, 4]]
    assert (made.dropped, packer.flush()) == (1, [])


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit", "none"])
def test_drop_leaves_out_long_documents_and_counts_them(algorithm: str):
    corpus, packer = Corpus(pairs(10, 4, 5, 3)), bins(algorithm, 4, long_documents="drop")
    made = corpus.segment(packer, 9)
    assert made.pieces[:, 5:].tolist() == [[1, 0, 4], [3, 0, 3]]
    assert (made.dropped, made.padding) == (15, 1)
    assert corpus.segment(packer, 9).dropped == 0


def test_tokens_that_are_no_loss_targets_are_inputs_but_not_labels():
    corpus = Corpus([[1, ~2, ~3, 4], [~5, 6]])
    rows = corpus.segment(bins("best_fit", 6), 1)
    assert rows.sequences[0].tolist() == [[1, 2, 3, 5, PAD, PAD]]
    assert rows.sequences[1].tolist() == [[NO, NO, 4, 6, NO, NO]]
    corpus, packer = Corpus([[1, ~2, 3, ~4, 5, ~6, 7]]), bins("first_fit", 4)
    assert corpus.segment(packer, 1).sequences[1].tolist() == [[NO, 3, NO, 5]]
    assert_rows(corpus.segment(packer, 1), [[5, 6, PAD, PAD]], [[NO, 7, NO, NO]], [[0, 1, 0, 1]], 2)


def test_what_waits_is_a_copy_that_keeps_no_block_in_memory():
    packer = bins("best_fit", 8, 4)
    packer.begin(1)
    block = documents(pairs(3, 12))
    packer.push(block)
    packer.take()
    waiting = [t for row in (packer._rest, *packer._open.values()) for t in row.tokens]
    assert [t.tolist() for t in waiting] == [[18, 19, 20, 21, 22], [0, 1, 2, 3]]
    assert all(t.base is None and not np.shares_memory(t, block.tokens) for t in waiting)


def test_what_other_settings_left_open_is_packed_anew():
    """As a resume does whose settings were changed, and accepted."""
    corpus, packer = Corpus(pairs(5, 6, 4)), bins("best_fit", 8, 3)
    corpus.segment(packer, 1)
    unfinished = [
        [],
        [Reference(0, 0, 0, 0, 0, 5)],
        [Reference(0, 0, 0, 1, 0, 3), Reference(0, 0, 0, 2, 0, 4)],
    ]
    packer = bins("best_fit", 6, 1)
    packer.restore(corpus.read(unfinished))
    assert packer.flush() == [unfinished[2], unfinished[1]]
    assert layout(corpus, packer, 1) == [[(0, 5)]]
    assert packer.flush() == [[unfinished[2][1]], [unfinished[2][0]]]
    assert layout(corpus, packer, 5) == [[(1, 3)], [(2, 4)]]
    assert packer.flush() == []


def test_wrap_is_refused():
    with pytest.raises(ValueError, match="algorithm = 'wrap'"):
        bins("wrap", 4)


@st.composite
def packings(draw: st.DrawFn) -> PackingConfig:
    algorithm: Any = draw(st.sampled_from(["first_fit", "best_fit", "best_fit_wrap", "none"]))
    policies: list[Any] = (
        ["split"] if algorithm == "best_fit_wrap" else ["split", "truncate", "drop"]
    )
    return PackingConfig(
        algorithm=algorithm,
        open_bins=draw(st.integers(1, 5)),
        max_documents=draw(st.integers(0, 4)),
        long_documents=draw(st.sampled_from(policies)),
    )


class MixedBins(Bins):
    """Makes document ``i`` one of dataset ``i * i % datasets``."""

    def push(self, documents: Documents) -> int:
        documents.places[:, 0] = documents.places[:, 3] ** 2 % len(self._groups)
        return super().push(documents)


@settings(deadline=None, max_examples=400)
@given(
    config=packings(),
    groups=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 20), max_size=40),
    masked=st.sets(st.integers(0, 40)),
    seq_len=st.integers(1, 9),
    rows=st.integers(1, 4),
    window=st.integers(1, 6),
)
def test_every_pair_is_trained_waits_or_is_dropped_and_restoring_equals_going_on(
    config, groups, counts, masked, seq_len, rows, window
):
    # In some documents every second token is no loss target.
    tokens = [
        [~t if d in masked and i % 2 else t for i, t in enumerate(document)]
        for d, document in enumerate(pairs(*counts))
    ]
    corpus = Corpus(tokens, window)
    packer = MixedBins(config, seq_len, PAD, groups)
    made, dropped = [], 0
    for _ in range(1000):
        restored = MixedBins(config, seq_len, PAD, groups)
        restored.restore(corpus.read(packer.flush()))
        fresh = Corpus(tokens, window + 1, corpus.at).segment(restored, rows)
        made.append(corpus.segment(packer, rows))
        assert_equal_rows(fresh, made[-1])
        assert fresh.dropped == made[-1].dropped
        assert restored.flush() == packer.flush()
        assert_pieces_rebuild(made[-1], tokens)
        assert len(packer.flush()) <= config.open_bins + 1
        dropped += made[-1].dropped
        waiting = sum(r.stop - r.start for row in packer.flush() for r in row)
        trained = len(pairs_of(made))
        assert sum(counts[: corpus.at]) == trained + waiting + dropped
        if len(made[-1]) < rows:
            break
    assert packer.flush() == []
    assert len(set(pairs_of(made))) == len(pairs_of(made)) == sum(counts) - dropped
    places = sum(segment.tokens.size for segment in made)
    assert sum(segment.padding for segment in made) == places - sum(counts) + dropped
    pieces = np.concatenate([segment.pieces for segment in made]).tolist()
    whole = {d for *_, d, a, b in pieces if b - a == counts[d]}
    if config.algorithm != "best_fit_wrap":
        assert {d for d, count in enumerate(counts) if count <= seq_len} <= whole
    kept = {"split": lambda n: n, "truncate": lambda n: min(n, seq_len), "drop": lambda n: 0}
    lost = [n - kept[config.long_documents](n) for n in counts if n > seq_len]
    assert dropped == sum(lost)
    for segment in made:
        assert_rows_keep_to_the_settings(segment, config, groups)


def assert_rows_keep_to_the_settings(rows: Rows, config: PackingConfig, groups: list[int]) -> None:
    most = 1 if config.algorithm == "none" else config.max_documents
    for row in range(len(rows)):
        mine = rows.pieces[rows.pieces[:, 0] == row]
        assert len({groups[dataset] for dataset in mine[:, 2].tolist()}) == 1
        assert len(mine) <= most or most == 0


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.integers(1, 20), max_size=60),
    seq_len=st.integers(1, 9),
    open_bins=st.integers(1, 5),
    rows=st.integers(1, 4),
)
def test_best_fit_wrap_pads_only_at_the_end_of_the_data(counts, seq_len, open_bins, rows):
    corpus, packer = Corpus(pairs(*counts)), bins("best_fit_wrap", seq_len, open_bins)
    padding = []
    for _ in range(1000):
        made = corpus.segment(packer, rows)
        padding += (seq_len - np.bincount(made.pieces[:, 0], sizes_of(made))).tolist()
        if len(made) < rows:
            break
    assert all(places == 0 for places in padding[:-open_bins])


def sizes_of(rows: Rows) -> np.ndarray:
    return rows.pieces[:, 7] - rows.pieces[:, 6]


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.integers(1, 20), max_size=40),
    seq_len=st.integers(1, 9),
    rows=st.integers(1, 4),
)
def test_best_fit_wrap_with_one_open_row_is_wrap(counts, seq_len, rows):
    tokens = pairs(*counts)
    corpus, packer = Corpus(tokens), bins("best_fit_wrap", seq_len, 1)
    other, wrap = Corpus(tokens), Wrap(seq_len, PAD)
    for _ in range(1000):
        made = corpus.segment(packer, rows)
        assert_equal_rows(made, other.segment(wrap, rows))
        if len(made) < rows:
            break
