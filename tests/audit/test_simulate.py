"""Simulated ranks are given what real ones would be, and a rank given other rows is caught."""

from pathlib import Path
from typing import Any

import pytest

from tests.audit.trained import SEQ_LEN, write_data
from tests.helpers import Run, global_batches, make_pipeline
from torchtitan_zephon.audit.simulate import simulate
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.steps import Step, Steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def table(folder: Path) -> dict[str, Any]:
    return write_data(folder)


def pipeline_of(table: dict[str, Any], folder: Path, **more: Any) -> Pipeline:
    return make_pipeline(table | more, seq_len=SEQ_LEN, tokenizer=folder / "tokenizer")


@pytest.mark.parametrize("honest", [False, True])
@pytest.mark.parametrize("lanes", [5, 6])
def test_resumes_on_any_ranks_have_the_global_batches_of_a_real_run(
    lanes: int, honest: bool, table: dict[str, Any], folder: Path
) -> None:
    pipeline = pipeline_of(table, folder, lanes=lanes)
    arms = simulate(pipeline, batch=24, ranks=4, resume=[1, 3, 8, 24], at=5, steps=9, honest=honest)
    expected = global_batches(pipeline, batch=24, runs=[Run(1, 9)])
    assert list(arms[0].digests.items()) == list(enumerate(expected, start=1))
    assert [(a.ranks, len(a.looked_at), a.differing, list(a.digests)) for a in arms[1:]] == [
        (1, 1, [], [6, 7, 8, 9]),
        (3, 3, [], [6, 7, 8, 9]),
        (8, 8, [], [6, 7, 8, 9]),
        (24, 24, [], [6, 7, 8, 9]),
    ]
    assert all(arm.digests == dict(list(arms[0].digests.items())[5:]) for arm in arms[1:])


def test_of_thousands_of_ranks_a_sample_is_looked_at_the_first_and_the_last_among_it(
    table: dict[str, Any], folder: Path
) -> None:
    pipeline = pipeline_of(table, folder, lanes=64)
    options: dict[str, Any] = {"batch": 2048, "ranks": 2048, "at": 1, "steps": 2}
    first, few = simulate(pipeline, resume=[1024], **options, sample_ranks=5)
    assert first.ranks == 2048
    assert (len(few.looked_at), few.looked_at[0], few.looked_at[-1]) == (5, 0, 1023)
    assert few.sampled
    assert few.differing == []
    _, honest = simulate(pipeline, resume=[1024], **options, sample_ranks=2, honest=True)
    assert (honest.looked_at, honest.differing) == ([0, 1023], [])


def test_a_rank_that_is_given_other_rows_is_found_and_named(
    table: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Steps.take

    def faulty(self: Steps, count: int) -> list[Step]:
        steps = sound(self, count)
        for step in steps:
            if (self._ranks, self._rank, step.consumed) == (3, 2, 7 * 24):
                step.batches[0][0, 0, 0] += 1
        return steps

    monkeypatch.setattr(Steps, "take", faulty)
    arms = simulate(
        pipeline_of(table, folder), batch=24, ranks=2, resume=[4, 3], at=5, steps=8, honest=True
    )
    assert [(a.differing, a.wrong_ranks) for a in arms] == [([], []), ([], []), ([7], [2])]
    assert arms[2].digests[7] != arms[0].digests[7]


def test_numbers_that_do_not_fit_are_refused_all_at_once(
    table: dict[str, Any], folder: Path
) -> None:
    with pytest.raises(ValueError, match="5 ranks.*7 ranks.*--at 9 --steps 9.*--sample-ranks 0"):
        simulate(
            pipeline_of(table, folder),
            batch=24,
            ranks=5,
            resume=[7, 3],
            at=9,
            steps=9,
            sample_ranks=0,
        )
