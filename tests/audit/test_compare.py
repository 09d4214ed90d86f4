"""Runs compared by their logs: sound ones agree, and a planted fault is named for what it is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.audit.trained import fault, train, write_data
from tests.helpers import Run
from torchtitan_zephon.audit.compare import Comparison, OtherRecipeError, compare, contradictions
from torchtitan_zephon.audit.log import AuditError
from torchtitan_zephon.audit.runs import read_run
from torchtitan_zephon.steps import Step, sequence_digest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def sound(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 2 ranks that never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "sound"
    train(folder, data, [Run(2, 8)])
    return folder


def compared(sound: Path, other: Path, **options: Any) -> Comparison:
    return compare(read_run(str(sound)), read_run(str(other)), **options)


def rows_of(step: Step) -> np.ndarray:
    """A copy of a step's sequences, [rows, 3, seq_len]: inputs, labels and positions."""
    return np.concatenate(step.batches, axis=1).transpose(1, 0, 2).copy()


def altered(step: Step, rows: np.ndarray) -> Step:
    """The step with other sequences, its digests those of what it now holds."""
    batches = np.split(rows.transpose(1, 0, 2), len(step.batches), axis=1)
    digests = [sequence_digest(*row) for row in rows]
    return dataclasses.replace(step, batches=batches, digests=digests)


def test_a_run_resumed_on_4_3_and_1_ranks_is_the_same_as_one_that_never_stopped(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    train(tmp_path / "resumed", data, [Run(4, 3), Run(3, 2), Run(1, 3)])
    result = compared(sound, tmp_path / "resumed")
    assert result.same
    assert result.compared == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (result.differing, result.findings, result.notes) == ([], [], [])
    assert contradictions(read_run(str(tmp_path / "resumed"))) == []


@pytest.mark.parametrize("where", ["", "audit", "audit/global_batches.jsonl"])
def test_a_run_is_named_by_its_folder_its_audit_folder_or_its_log(sound: Path, where: str) -> None:
    assert list(read_run(str(sound / where)).steps) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_one_token_flipped_in_one_ranks_memory_is_named_with_rank_sequence_place_and_ids(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    was = []

    def flip(rank: int, number: int, step: Step) -> Step:
        if (rank, number) != (2, 6):
            return step
        rows = rows_of(step)
        was.append(int(rows[1, 0, 17]))
        rows[1, 0, 17] ^= 4
        return altered(step, rows)

    with fault(flip):
        train(tmp_path / "flipped", data, [Run(2, 3), Run(4, 5)])
    result = compared(sound, tmp_path / "flipped")
    assert (result.differing, result.what) == ([6], "tokens")
    (finding,) = result.findings
    assert (finding.step, finding.kind, finding.sequence) == (6, "one sequence", 7)
    assert finding.text == (
        "sequence 7 of 12 differs, all others are the same; in "
        f"{tmp_path / 'flipped'} it was given to rank 2 of 4"
    )
    assert result.notes == [
        f"{sound}: step 6, made again from its recipe, is as logged",
        f"{tmp_path / 'flipped'}: step 6, made again from its recipe, is NOT as logged",
        f"so {tmp_path / 'flipped'} was given other data than its recipe and cursors say: look "
        "for a fault of memory, of the code, or of the data at the time",
        f"sequence 7: place 17 has token {was[0] ^ 4} where the recipe gives {was[0]}; everything "
        "else in it is the same",
    ]


def test_a_label_that_differs_is_told_from_a_token(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    def flip(rank: int, number: int, step: Step) -> Step:
        if number != 3:
            return step
        rows = rows_of(step)
        rows[11, 1, 31] ^= 1
        return altered(step, rows)

    with fault(flip):
        train(tmp_path / "flipped", data, [Run(1, 4)])
    result = compared(sound, tmp_path / "flipped")
    assert (result.differing, result.what) == ([3], "labels")
    assert result.findings[0].sequence == 11
    assert result.notes[-1].startswith("sequence 11: place 31 has label ")


def test_two_sequences_that_changed_places_in_a_step_are_order_only(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    def swap(rank: int, number: int, step: Step) -> Step:
        if number != 5:
            return step
        order = [0, 1, 8, 3, 4, 5, 6, 7, 2, 9, 10, 11]
        return altered(step, rows_of(step)[order])

    with fault(swap):
        train(tmp_path / "swapped", data, [Run(1, 6)])
    result = compared(sound, tmp_path / "swapped")
    assert (result.differing, result.what) == ([5], "order only")
    assert result.findings[0].text == "the same sequences in another order"
    assert result.notes[-1] == "sequences 2 and 8 of the step changed places"
    by_log = compared(sound, tmp_path / "swapped", rebuild=False)
    assert (by_log.what, by_log.notes) == ("order only", [])


def test_two_sequences_swapped_between_steps_are_named_with_both_places_by_the_logs_alone(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    held = {}

    def swap(rank: int, number: int, step: Step) -> Step:
        # Sequence 3 of step 4 and 10 of step 7; the rows of step 7 are known from the sound run.
        if number not in (4, 7):
            return step
        mine, other = {4: (3, (7, 10)), 7: (10, (4, 3))}[number]
        rows = rows_of(step)
        rows[mine] = held[other]
        return altered(step, rows)

    def hold(rank: int, number: int, step: Step) -> Step:
        held.update({(number, i): row for i, row in enumerate(rows_of(step))})
        return step

    with fault(hold):
        train(tmp_path / "before", data, [Run(1, 7)])
    with fault(swap):
        train(tmp_path / "swapped", data, [Run(1, 8)])
    result = compared(sound, tmp_path / "swapped", rebuild=False)
    assert (result.differing, result.what) == ([4, 7], "moved")
    assert [(f.step, f.sequence, f.other_step, f.text) for f in result.findings] == [
        (4, 3, 7, "sequence 3 of step 4 and 10 of step 7 changed places"),
        (7, 10, 4, "sequence 3 of step 4 and 10 of step 7 changed places"),
    ]


def test_another_seed_is_refused_with_the_field_and_both_values_unless_any_recipe_will_do(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    train(tmp_path / "other", {**data, "seed": 4}, [Run(1, 3)])
    with pytest.raises(OtherRecipeError, match=r"of another recipe than .*: seed: 3 -> 4 \(--any"):
        compared(sound, tmp_path / "other")
    result = compared(sound, tmp_path / "other", any_recipe=True)
    assert (result.compared, result.differing, result.what) == ([1, 2, 3], [1, 2, 3], "tokens")
    assert result.findings[0].kind == "sequences"
    assert result.notes[0:2] == [
        f"{sound}: step 1, made again from its recipe, is as logged",
        f"{tmp_path / 'other'}: step 1, made again from its recipe, is as logged",
    ]
    assert result.notes[2] == "12 of 12 sequences differ, the first is sequence 0"


def test_another_batch_size_is_said_to_take_other_sequences(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    state = train(tmp_path / "smaller", data, [Run(2, 2)])
    train(tmp_path / "smaller", data, [Run(2, 2)], batch=6, state=state)
    result = compared(sound, tmp_path / "smaller")
    assert result.differing == [3, 4]
    assert result.findings[0].text == (
        f"other sequences of the run: 24 to 35 in {sound}, 24 to 29 in {tmp_path / 'smaller'}"
    )


def test_a_torn_last_line_and_steps_logged_twice_do_no_harm(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    state = train(tmp_path / "killed", data, [Run(2, 3)])
    train(tmp_path / "killed", data, [Run(3, 3)], state=state)
    log = tmp_path / "killed" / "audit" / "global_batches.jsonl"
    log.write_bytes(log.read_bytes()[:-40])
    assert compared(sound, tmp_path / "killed").compared == [1, 2, 3, 4, 5]
    train(tmp_path / "killed", data, [Run(4, 5)], state=state)
    run = read_run(str(tmp_path / "killed"))
    assert list(run.steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert compared(sound, tmp_path / "killed").same
    assert contradictions(run) == []


def test_a_step_logged_twice_with_different_data_and_an_edited_line_are_told(
    sound: Path, tmp_path: Path
) -> None:
    lines = (sound / "audit" / "global_batches.jsonl").read_text().splitlines()
    edited = json.loads(lines[4]) | {"sha256": "ab" * 32}
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, json.dumps(edited)]) + "\n")
    run = read_run(str(tmp_path / "log.jsonl"))
    assert contradictions(run) == [
        f"{run.name}: step 5 was logged twice with different data: "
        f"{json.loads(lines[4])['sha256'][:16]}, then {'ab' * 8}",
        f"{run.name}: the chain breaks at step 5: a line was edited or taken out",
    ]
    assert run.contradicted == {5: (json.loads(lines[4])["sha256"], "ab" * 32)}


def test_a_line_taken_out_breaks_the_chain(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "audit").mkdir()
    for path in (sound / "audit").iterdir():
        (tmp_path / "audit" / path.name).write_bytes(path.read_bytes())
    log = tmp_path / "audit" / "global_batches.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3] + lines[4:]))
    assert read_run(str(tmp_path)).broken == [5]
    assert read_run(str(sound)).broken == []


def test_logs_that_were_written_without_sums_are_compared_by_their_digests(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    lines = (sound / "audit" / "global_batches.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        del record["sums"]
    records[2]["sha256"] = "00" * 32
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(r) + "\n" for r in records))
    result = compared(sound, log, rebuild=False)
    assert (result.differing, result.findings[0].kind) == ([3], "unknown")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder; give a run's folder"),
        ("", "no step is logged"),
        ('{"step": 1}\n', "not a step of an audit log"),
        ("[1]\n", "not a step of an audit log"),
        ('{"step": oops}\n', "line 1: not JSON"),
    ],
)
def test_a_log_that_is_none_is_an_error_that_names_it(
    content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AuditError, match=f"log.jsonl.*{message}"):
        read_run(str(path))


def test_runs_without_a_step_in_common_cannot_be_compared(
    data: dict[str, Any], sound: Path, tmp_path: Path
) -> None:
    lines = (sound / "audit" / "global_batches.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "b.jsonl").write_text("".join(lines[4:]))
    with pytest.raises(AuditError, match="have no step in common"):
        compare(read_run(str(tmp_path / "a.jsonl")), read_run(str(tmp_path / "b.jsonl")))
