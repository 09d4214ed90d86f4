"""Saving and resuming: what is refused, what is not, and that nothing is lost or repeated."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import (
    Run,
    assert_same_stream,
    batch_streams,
    digest,
    global_batches,
    make_pipeline,
    merge_states,
    take_step,
)
from tests.toys import byte_ids, byte_tokenizer, write_jsonl
from torchtitan_zephon.lane import StateError
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.stream import BatchStream

BATCH = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    write_jsonl(tmp_path / "a" / "0.jsonl", [f"{n:03d}" * (n % 7 + 1) for n in range(40)])
    write_jsonl(tmp_path / "a" / "1.jsonl", [f"{n:03d}" * (n % 5 + 1) for n in range(40, 80)])
    write_jsonl(tmp_path / "b.jsonl", [f"{n:04d}" * (n % 9 + 1) for n in range(60)])
    return {
        "seed": 7,
        "lanes": 4,
        "datasets": [
            {"name": "a", "path": str(tmp_path / "a"), "weight": 0.7},
            {"name": "b", "path": str(tmp_path / "b.jsonl"), "weight": 0.3},
        ],
        "shuffle": {"buffer_size": 20},
    }


@pytest.fixture
def pipeline(table: dict[str, Any], tokenizer: Path) -> Pipeline:
    return make_pipeline(table, seq_len=16, tokenizer=tokenizer)


def saved_after(pipeline: Pipeline, steps: int, *, ranks: int = 2) -> dict[str, Any]:
    streams = batch_streams(pipeline, batch=BATCH, run=Run(ranks, steps))
    for _ in range(steps):
        take_step(streams, batch=BATCH, micro_batch=1)
    state = merge_states([s.state_dict() for s in streams])
    for stream in streams:
        stream.close()
    return state


def one_rank(pipeline: Pipeline, *, batch: int = BATCH) -> BatchStream:
    return BatchStream(pipeline, batch=batch, micro_batch=batch, rank=0, ranks=1)


def stack(row: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.stack(row).astype("<i4")


def row_documents(pipeline: Pipeline, stream: BatchStream, steps: int) -> list[str]:
    """The texts of steps in which every row is one document of three characters."""
    out = []
    for _ in range(steps):
        inputs, _, _ = next(stream)
        out += [pipeline.tokenizer.decode(row[1:].tolist()) for row in inputs]
    return out


def test_saved_at_dp_4_and_resumed_at_dp_2_1_and_3_it_equals_the_uninterrupted_run(
    pipeline: Pipeline,
) -> None:
    for ranks in (2, 1, 3):
        assert_same_stream(pipeline, batch=BATCH, runs=[Run(4, 3), Run(ranks, 7)])


def test_2_4_2_and_8_3_8_ranks_equal_an_unbroken_run(pipeline: Pipeline) -> None:
    assert_same_stream(pipeline, batch=12, runs=[Run(2, 3), Run(4, 3), Run(2, 3)])
    assert_same_stream(pipeline, batch=24, runs=[Run(8, 3), Run(3, 3), Run(8, 3)])


def test_five_times_ten_consumed_five_consumed_and_the_next_document_is_number_15(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "d.jsonl", [f"{n:03d}" for n in range(40)])
    table = {
        "lanes": 1,
        "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}],
        "shuffle": {"buffer_size": 0, "order": "sequential"},
    }
    pipeline = make_pipeline(table, seq_len=4, tokenizer=tokenizer)
    for _ in range(5):
        state = one_rank(pipeline, batch=1).state_dict()
        for count in (10, 5):
            stream = one_rank(pipeline, batch=1)
            stream.load_state_dict(state)
            row_documents(pipeline, stream, count)
            state = stream.state_dict()
            stream.close()
        stream = one_rank(pipeline, batch=1)
        stream.load_state_dict(state)
        assert row_documents(pipeline, stream, 1) == ["015"]
        stream.close()


def test_resumed_with_three_batches_left_of_an_epoch_the_next_epoch_has_all_128_rows(
    tmp_path: Path, tokenizer: Path
) -> None:
    every = [f"{n:03d}" for n in range(128)]
    write_jsonl(tmp_path / "d.jsonl", every)
    table = {
        "lanes": 1,
        "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}],
        "shuffle": {"buffer_size": 0},
    }
    pipeline = make_pipeline(table, seq_len=4, tokenizer=tokenizer)
    first = one_rank(pipeline, batch=8)
    seen = row_documents(pipeline, first, 13)
    state = first.state_dict()
    first.close()
    second = one_rank(pipeline, batch=8)
    second.load_state_dict(state)
    seen += row_documents(pipeline, second, 3)
    assert Counter(seen) == Counter(every)
    next_epoch = row_documents(pipeline, second, 16)
    second.close()
    assert Counter(next_epoch) == Counter(every)
    assert next_epoch != seen


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 16])
def test_state_after_load_is_the_state_that_was_loaded(tmp_path, tokenizer, steps: int) -> None:
    # One row a document and 64 of them: 16 steps of 4 are exactly an epoch.
    write_jsonl(tmp_path / "d.jsonl", [f"{n:03d}" for n in range(64)])
    table = {"lanes": 1, "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}]}
    pipeline = make_pipeline(table, seq_len=4, tokenizer=tokenizer)
    stream = one_rank(pipeline, batch=4)
    for _ in range(steps):
        next(stream)
    state = stream.state_dict()
    other = one_rank(pipeline, batch=4)
    other.load_state_dict(state)
    assert other.state_dict() == state
    stream.close()
    other.close()


def test_restored_and_saved_at_once_the_continuation_is_unchanged(pipeline: Pipeline) -> None:
    assert_same_stream(
        pipeline, batch=BATCH, runs=[Run(4, 3), Run(3, 0), Run(2, 0), Run(1, 0), Run(6, 4)]
    )


def test_a_state_taken_before_the_first_batch_survives_json_and_resumes(
    pipeline: Pipeline,
) -> None:
    assert_same_stream(pipeline, batch=BATCH, runs=[Run(2, 0), Run(4, 5)])


def test_a_second_for_over_the_same_loader_goes_on_where_the_first_stopped(
    pipeline: Pipeline,
) -> None:
    expected = global_batches(pipeline, batch=BATCH, runs=[Run(1, 6)])
    stream = one_rank(pipeline)
    got = []
    for _ in range(2):
        for count, (inputs, labels, positions) in enumerate(stream, start=1):
            rows = zip(inputs, labels, positions, strict=True)
            got.append(digest([stack(row) for row in rows]))
            if count == 3:
                break
    stream.close()
    assert got == expected


def test_the_global_batch_may_change_at_a_restart_and_no_sequence_is_lost_or_repeated(
    pipeline: Pipeline,
) -> None:
    def sequences(batches: list[tuple[int, int, int]]) -> Counter[str]:
        out: Counter[str] = Counter()
        state = None
        for batch, ranks, steps in batches:
            streams = batch_streams(pipeline, batch=batch, run=Run(ranks, steps))
            for stream in streams:
                if state is not None:
                    stream.load_state_dict(state)
            for _ in range(steps):
                out.update(digest([r]) for r in take_step(streams, batch=batch, micro_batch=1))
            state = merge_states([s.state_dict() for s in streams])
            for stream in streams:
                stream.close()
        return out

    assert sequences([(12, 3, 3), (10, 5, 3), (7, 7, 2)]) == sequences([(80, 4, 1)])


def test_a_state_inside_a_step_describes_the_last_complete_step_and_warns(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    stream = BatchStream(pipeline, batch=BATCH, micro_batch=3, rank=0, ranks=1)
    for _ in range(4):
        next(stream)
    complete = stream.state_dict()
    assert caplog.records == []
    next(stream)
    assert stream.state_dict() == complete
    assert "describes the last complete step" in caplog.text
    assert "the 3 sequences of this one" in caplog.text
    stream.close()


def test_a_missing_lane_entry_is_refused_and_named(pipeline: Pipeline) -> None:
    state = saved_after(pipeline, 3)
    del state["lane"]["00002"]
    with pytest.raises(StateError, match=r"no entry for lane 2 \(dataloader\.lane\.00002\)"):
        one_rank(pipeline).load_state_dict(state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda e: e.replace('"segment":', '"segment":1'), "lane 2 is damaged: its check sum"),
        (lambda e: e[: len(e) // 2], "lane 2 is damaged"),
        (lambda e: "", "lane 2 is damaged"),
        (lambda e: None, "lane 2 is damaged"),
    ],
)
def test_a_damaged_lane_entry_is_refused_and_named(
    pipeline: Pipeline, damage: Any, message: str
) -> None:
    state = saved_after(pipeline, 3)
    state["lane"]["00002"] = damage(state["lane"]["00002"])
    with pytest.raises(StateError, match=message):
        one_rank(pipeline).load_state_dict(state)


def test_another_lanes_entry_or_one_of_another_checkpoint_is_refused(pipeline: Pipeline) -> None:
    early, late = saved_after(pipeline, 1), saved_after(pipeline, 9)
    swapped = {**late, "lane": {**late["lane"], "00001": late["lane"]["00002"]}}
    with pytest.raises(StateError, match="it belongs to lane 2"):
        one_rank(pipeline).load_state_dict(swapped)
    mixed = {**late, "lane": {**late["lane"], "00001": early["lane"]["00001"]}}
    with pytest.raises(StateError, match="lane 1 is of segment 0, .* the lane is in segment 5"):
        one_rank(pipeline).load_state_dict(mixed)


def test_a_checkpoint_without_a_loader_entry_or_with_a_damaged_one_is_refused(
    pipeline: Pipeline,
) -> None:
    with pytest.raises(StateError, match=r"no loader entry \(dataloader\.meta\)"):
        one_rank(pipeline).load_state_dict({"world_size": 2})
    with pytest.raises(StateError, match="dataloader.meta is damaged"):
        one_rank(pipeline).load_state_dict({"meta": "{", "lane": {}})
    state = saved_after(pipeline, 1)
    meta = json.loads(state["meta"]) | {"format_version": 99}
    with pytest.raises(StateError, match="has format version 99, this release reads 1"):
        one_rank(pipeline).load_state_dict({**state, "meta": json.dumps(meta)})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 8}, "seed: 7 -> 8"),
    "special tokens": ({"tokenizer": {"special_tokens": "parse"}}, '"text" -> "parse"'),
    "packing": ({"packing": {"algorithm": "first_fit"}}, '"wrap" -> "first_fit"'),
    "shuffle buffer": ({"shuffle": {"buffer_size": 40}}, "shuffle.buffer_size: 20 -> 40"),
    "order": (
        {"shuffle": {"buffer_size": 20, "order": "sequential"}},
        'shuffle.order: "random" -> "sequential"',
    ),
    "lanes": ({"lanes": 3}, "lanes: 4 -> 3"),
    "seq_len": ({"seq_len": 17}, "seq_len: 16 -> 17"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_another_recipe_is_refused_naming_the_field_with_both_values(
    change: str, pipeline: Pipeline, table: dict[str, Any], tokenizer: Path
) -> None:
    changes, message = REFUSED[change]
    seq_len = changes.get("seq_len", 16)
    changed = {**table, **{k: v for k, v in changes.items() if k != "seq_len"}}
    other = make_pipeline(changed, seq_len=seq_len, tokenizer=tokenizer)
    with pytest.raises(StateError) as refusal:
        one_rank(other).load_state_dict(saved_after(pipeline, 2))
    assert message in str(refusal.value)
    assert "made with another recipe" in str(refusal.value)


def test_another_weight_tokenizer_shard_list_or_byte_of_a_file_is_refused(
    pipeline: Pipeline, table: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    state = saved_after(pipeline, 2)

    def refusal(table: dict[str, Any], tokenizer: Path) -> str:
        with pytest.raises(StateError) as error:
            one_rank(make_pipeline(table, seq_len=16, tokenizer=tokenizer)).load_state_dict(state)
        return str(error.value)

    first, second = table["datasets"]
    reweighted = {**table, "datasets": [first, {**second, "weight": 0.4}]}
    assert "datasets.b.weight: 0.3 -> 0.4" in refusal(reweighted, tokenizer)
    renamed = {**table, "datasets": [first, {**second, "name": "c"}]}
    assert "datasets.c: not there -> " in refusal(renamed, tokenizer)
    no_bos = byte_tokenizer(tmp_path / "other", bos=False)
    assert "tokenizer.contents: " in refusal(table, no_bos)

    shard = tmp_path / "a" / "1.jsonl"
    before = shard.read_bytes()
    shard.write_bytes(before.replace(b"041", b"941", 1))
    text = refusal(table, tokenizer)
    assert "datasets.a.content: " in text
    assert "datasets.a.bytes" not in text
    shard.write_bytes(before)
    write_jsonl(tmp_path / "a" / "2.jsonl", ["more"])
    assert "datasets.a.shards: 2 -> 3" in refusal(table, tokenizer)


def test_runtime_settings_ranks_and_moved_data_are_not_refused(
    pipeline: Pipeline, table: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    state = saved_after(pipeline, 2, ranks=3)
    expected = global_batches(pipeline, batch=BATCH, runs=[Run(1, 3)])[-1]
    shutil.move(tmp_path / "a", tmp_path / "moved")
    datasets = [{**table["datasets"][0], "path": str(tmp_path / "moved")}, table["datasets"][1]]
    runtime = {"threads": 2, "prefetch_steps": 5, "tokenizer_backend": "tokenizers"}
    moved = {**table, "datasets": datasets, "runtime": runtime}
    stream = one_rank(make_pipeline(moved, seq_len=16, tokenizer=tokenizer))
    stream.load_state_dict(state)
    got = digest([stack(row) for row in zip(*next(stream), strict=True)])
    stream.close()
    assert got == expected


def test_a_resume_point_that_is_not_there_any_more_is_an_error_never_an_empty_stream(
    table: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    accepting = {**table, "resume": {"on_recipe_change": "accept"}}
    pipeline = make_pipeline(accepting, seq_len=16, tokenizer=tokenizer)
    state = saved_after(pipeline, 5)
    # The fingerprint is taken when the run begins; then the file loses most of its lines.
    stream = one_rank(pipeline)
    stream.load_state_dict(state)
    for name in ("a/0.jsonl", "a/1.jsonl", "b.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"shorter than the \d+ bytes it had when the run began"):
        next(stream)
    # And it stays an error, however often it is asked.
    with pytest.raises(ValueError, match="shorter than"):
        next(stream)
    stream.close()


def test_a_recipe_change_that_is_accepted_goes_on_and_shares_follow_the_new_weights(
    pipeline: Pipeline,
    table: dict[str, Any],
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = saved_after(pipeline, 4)
    first, second = table["datasets"]
    changed = {
        **table,
        "datasets": [{**first, "weight": 0.1}, {**second, "weight": 0.9}],
        "resume": {"on_recipe_change": "accept"},
    }
    other = make_pipeline(changed, seq_len=16, tokenizer=tokenizer)
    stream = one_rank(other)
    stream.load_state_dict(state)
    assert "datasets.a.weight: 0.7 -> 0.1" in caplog.text
    assert "tokens that were read but not trained on yet are dropped" in caplog.text
    for _ in range(40):
        next(stream)
    state = stream.state_dict()
    stream.close()
    for lane in state["lane"].values():
        entry = json.loads(lane)
        drawn = zip(entry["positions"].items(), entry["base"], strict=True)
        tokens = {name: at[3] - before for (name, at), before in drawn}
        longest = max(len(byte_ids("0000" * 9)), len(byte_ids("000" * 7))) - 1
        # a leads or trails its tenth by less than a document.
        assert abs(tokens["a"] - sum(tokens.values()) / 10) <= longest


def test_lanes_or_the_shuffle_buffer_cannot_change_even_where_changes_are_accepted(
    pipeline: Pipeline, table: dict[str, Any], tokenizer: Path
) -> None:
    accept = {**table, "resume": {"on_recipe_change": "accept"}}
    state = saved_after(pipeline, 2)
    lanes = make_pipeline({**accept, "lanes": 3}, seq_len=16, tokenizer=tokenizer)
    with pytest.raises(StateError, match="set zephon.lanes = 4"):
        one_rank(lanes).load_state_dict(state)
    buffer = {**accept, "shuffle": {"buffer_size": 40}}
    with pytest.raises(StateError, match="buffer_size cannot change in mid-run"):
        one_rank(make_pipeline(buffer, seq_len=16, tokenizer=tokenizer)).load_state_dict(state)
