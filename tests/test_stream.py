"""The global order, the steps of a rank, and what becomes of threads and errors."""

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import Run, batch_streams, digest, global_batches, make_pipeline, take_step
from tests.toys import BOS_ID, EOS_ID, byte_tokenizer, write_jsonl
from torchtitan_zephon.ops.documents import IGNORE_LABEL
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.recipe import parse_recipe
from torchtitan_zephon.sources.storage import SourceError
from torchtitan_zephon.steps import Step, Steps, lanes_of_rank, step_slice
from torchtitan_zephon.stream import BatchStream

GOLDEN = Path(__file__).parent / "golden.json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def pseudo_texts(count: int, seed: int) -> list[str]:
    """Texts that are the same everywhere and for ever: hex of SHA-256, of many lengths."""
    out = []
    for n in range(count):
        digest = hashlib.sha256(f"{seed} {n}".encode()).hexdigest()
        out.append((digest * 4)[: int(digest[:2], 16)])
    return out


def golden_pipeline(folder: Path, tokenizer: Path, algorithm: str) -> Pipeline:
    write_jsonl(folder / "a" / "0.jsonl", pseudo_texts(300, 1))
    write_jsonl(folder / "a" / "1.jsonl", pseudo_texts(100, 2))
    write_jsonl(folder / "b.jsonl", pseudo_texts(200, 3))
    table = {
        "seed": 20261130,
        "lanes": 6,
        "datasets": [
            {"name": "a", "path": str(folder / "a"), "weight": 0.75},
            {"name": "b", "path": str(folder / "b.jsonl"), "weight": 0.25},
        ],
        "packing": {"algorithm": algorithm, "open_bins": 4},
        "shuffle": {"buffer_size": 50},
    }
    return make_pipeline(table, seq_len=64, tokenizer=tokenizer)


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit"])
def test_the_stream_of_a_fixed_recipe_is_what_it_was_in_every_release(
    algorithm: str, tmp_path: Path, tokenizer: Path
) -> None:
    """A change of the stream is a deliberate act: a new FORMAT_VERSION and a new golden file."""
    pipeline = golden_pipeline(tmp_path, tokenizer, algorithm)
    got = global_batches(pipeline, batch=12, runs=[Run(2, 8), Run(3, 8)])
    assert got == json.loads(GOLDEN.read_text())[algorithm]


def test_a_step_takes_the_next_sequences_ordered_by_lane_and_cut_into_equal_slices() -> None:
    # Sequences 6 to 11 of 4 lanes: 6, 7 are number 1 of lanes 2, 3; 8 to 11 number 2 of lanes 0-3.
    lane, number = step_slice(6, 6, 4, rank=0, ranks=1)
    assert lane.tolist() == [0, 1, 2, 2, 3, 3]
    assert number.tolist() == [2, 2, 1, 2, 1, 2]
    lane, number = step_slice(6, 6, 4, rank=1, ranks=3)
    assert lane.tolist() == [2, 2]
    assert number.tolist() == [1, 2]


def test_a_rank_makes_just_the_lanes_that_its_slices_touch() -> None:
    assert lanes_of_rank(12, 4, rank=0, ranks=2) == [0, 1]
    assert lanes_of_rank(12, 4, rank=1, ranks=3) == [1, 2]
    # More ranks than lanes: two ranks share lane 0, one has both of its sequences of lane 1.
    assert [lanes_of_rank(8, 4, rank=g, ranks=8) for g in range(4)] == [[0], [0], [1], [1]]
    # Where the lanes do not divide the batch, slices move from step to step.
    assert [lanes_of_rank(6, 4, g, ranks=3, first=0) for g in range(3)] == [[0, 1], [1, 2], [2, 3]]
    # And where it is not known yet where the run starts, every place where it may start counts.
    assert lanes_of_rank(3, 9, rank=0, ranks=3, first=0) == [0, 3, 6]
    assert lanes_of_rank(3, 9, rank=0, ranks=3) == [0, 1, 2, 3, 4, 5, 6]


def test_token_shares_are_half_and_half_over_documents_of_very_unequal_length(
    tmp_path: Path, tokenizer: Path
) -> None:
    """400-token documents against 4,000-token ones, wanted 1:1, shuffled, over four lanes."""
    write_jsonl(tmp_path / "a.jsonl", ["a" * 399] * 200)
    write_jsonl(tmp_path / "b.jsonl", ["b" * 3999] * 20)
    table = {
        "lanes": 4,
        "datasets": [{"name": n, "path": str(tmp_path / f"{n}.jsonl")} for n in "ab"],
        "shuffle": {"buffer_size": 8},
    }
    pipeline = make_pipeline(table, seq_len=1000, tokenizer=tokenizer)
    steps = Steps(
        pipeline,
        batch=100,
        micro_batch=100,
        rank=0,
        ranks=1,
        consumed=0,
        cursors={lane: pipeline.start(lane) for lane in range(4)},
        digests=False,
    )
    counts = np.array([step.tokens for step in steps.take(10)])
    assert counts.sum(axis=1).tolist() == [100_000] * 10
    shares = counts[:, 0] / 100_000
    assert np.abs(shares - 0.5).max() <= 0.05
    assert abs(counts[:, 0].sum() / 1_000_000 - 0.5) <= 0.01


def test_five_documents_beside_fifty_thousand_starve_no_lane_and_repeat(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "small.jsonl", [f"s{n}" * 5 for n in range(5)])
    write_jsonl(tmp_path / "large.jsonl", [f"l{n:05d}" for n in range(50_000)])
    table = {
        "datasets": [{"name": n, "path": str(tmp_path / f"{n}.jsonl")} for n in ("small", "large")],
    }
    pipeline = make_pipeline(table, seq_len=128, tokenizer=tokenizer, batch=64)
    (stream,) = batch_streams(pipeline, batch=64, run=Run(1, 30))
    totals = np.zeros(2, dtype=np.int64)

    def count(number: int, step: Step, before: object) -> None:
        totals[:] += step.tokens

    stream._on_step = count
    for _ in range(30):
        take_step([stream], batch=64, micro_batch=1)
    stream.close()
    assert totals.sum() == 30 * 64 * 128
    assert abs(totals[0] / totals.sum() - 0.5) < 0.01
    per_epoch = sum(len(f"s{n}" * 5) + 1 for n in range(5))
    assert totals[0] > 1000 * per_epoch


def test_a_mixture_of_one_dataset_is_that_dataset_alone_and_epoch_two_has_another_order(
    tmp_path: Path, tokenizer: Path
) -> None:
    every = [f"{n:03d}" for n in range(60)]
    write_jsonl(tmp_path / "d.jsonl", every)
    table = {
        "lanes": 1,
        "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl"), "weight": 0.3}],
        "shuffle": {"buffer_size": 0},
    }
    pipeline = make_pipeline(table, seq_len=4, tokenizer=tokenizer)
    feed = pipeline.lane(pipeline.start(0)).feeds[0]
    alone: list[str] = []
    while len(alone) < 120 and (block := feed.block()) is not None:
        alone += [
            pipeline.tokenizer.decode(block.document(i)[1:4].tolist()) for i in range(len(block))
        ]
        feed.position.row = len(block)
    (stream,) = batch_streams(pipeline, batch=1, run=Run(1, 120))
    mixed = [pipeline.tokenizer.decode(next(stream)[0][0, 1:].tolist()) for _ in range(120)]
    stream.close()
    assert mixed == alone
    assert sorted(mixed[:60]) == sorted(mixed[60:]) == every
    assert mixed[:60] != mixed[60:]
    assert mixed[:60] != every


def test_one_pass_ends_on_every_rank_at_the_same_step_with_padding_rows(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "v.jsonl", ["abc", "", "defgh"])
    table = {
        "datasets": [{"name": "t", "path": str(tmp_path / "v.jsonl")}],
        "validation": {"datasets": [{"name": "v", "path": str(tmp_path / "v.jsonl")}]},
    }
    recipe = parse_recipe(table, seq_len=4, tokenizer_path=str(tokenizer)).for_validation()
    pipeline = Pipeline(recipe)
    b = {c: 2 + ord(c) for c in "abcdefgh"}
    # Pairs: <s>abc -> abc</s>, <s> -> </s>, <s>defgh -> defgh</s>; 11 in rows of 4.
    inputs = [
        [BOS_ID, b["a"], b["b"], b["c"]],
        [BOS_ID, BOS_ID, b["d"], b["e"]],
        [b["f"], b["g"], b["h"], EOS_ID],
        [EOS_ID] * 4,
    ]
    labels = [
        [b["a"], b["b"], b["c"], EOS_ID],
        [EOS_ID, b["d"], b["e"], b["f"]],
        [b["g"], b["h"], EOS_ID, IGNORE_LABEL],
        [IGNORE_LABEL] * 4,
    ]
    positions = [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 0], [0, 1, 2, 3]]
    for ranks in (1, 2, 4):
        streams = batch_streams(pipeline, batch=4, run=Run(ranks, 1))
        rows = np.stack(take_step(streams, batch=4, micro_batch=1))
        assert rows[:, 0].tolist() == inputs
        assert rows[:, 1].tolist() == labels
        assert rows[:, 2].tolist() == positions
        for stream in streams:
            assert list(stream) == []
            assert list(stream) == []  # the end is final
            stream.close()


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_pass_of_many_segments_is_the_same_rows_and_steps_at_every_rank_count(
    ranks: int, algorithm: str, tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "v.jsonl", pseudo_texts(150, 4))
    data = {"datasets": [{"name": "v", "path": str(tmp_path / "v.jsonl")}]}
    table = {**data, "validation": data, "packing": {"algorithm": algorithm}}
    pipeline = Pipeline(
        parse_recipe(table, seq_len=64, tokenizer_path=str(tokenizer)).for_validation()
    )

    def steps(ranks: int) -> list[str]:
        streams = batch_streams(pipeline, batch=18, run=Run(ranks, 0, micro_batch=3))
        shares = [list(stream) for stream in streams]
        for stream in streams:
            stream.close()
        assert len({len(share) for share in shares}) == 1
        each = 6 // ranks
        out = []
        for at in range(0, len(shares[0]), each):
            parts = [part for share in shares for part in share[at : at + each]]
            rows = [np.stack(row) for part in parts for row in zip(*part, strict=True)]
            out.append(digest([row.astype("<i4") for row in rows]))
        return out

    want = steps(1)
    pairs = sum(len(t) + 1 for t in pseudo_texts(150, 4))
    assert len(want) >= pairs / 64 / 18 > 10
    assert steps(ranks) == want


def zephon_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("zephon"))


def test_closing_ends_every_thread_and_closing_again_is_fine(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "d.jsonl", pseudo_texts(100, 1))
    table = {
        "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}],
        "runtime": {"threads": 2},
    }
    pipeline = make_pipeline(table, seq_len=16, tokenizer=tokenizer, batch=4)
    (stream,) = batch_streams(pipeline, batch=4, run=Run(1, 1))
    next(stream)
    assert zephon_threads() != []
    stream.close()
    stream.close()
    assert zephon_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fault_in_the_data_is_raised_in_training_with_file_and_line_and_ends_every_thread(
    threads: int, tmp_path: Path, tokenizer: Path
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["good"] * 200)
    lines = path.read_text().splitlines(keepends=True)
    lines[150] = '{"text": 5}\n'
    path.write_text("".join(lines))
    table = {
        "datasets": [{"name": "d", "path": str(path)}],
        "runtime": {"threads": threads},
    }
    pipeline = make_pipeline(table, seq_len=16, tokenizer=tokenizer, batch=4)
    (stream,) = batch_streams(pipeline, batch=4, run=Run(1, 1))
    begin = time.monotonic()
    for _ in range(2):  # and again for whoever asks again
        with pytest.raises(SourceError, match=r"d\.jsonl, line 151: Expected str, got int"):
            list(stream)
    stream.close()
    assert zephon_threads() == []
    assert time.monotonic() - begin < 5


def test_a_batch_that_does_not_divide_is_refused_with_its_numbers(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "d.jsonl", ["text"])
    table = {"datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}]}
    pipeline = make_pipeline(table, seq_len=16, tokenizer=tokenizer, batch=12)
    with pytest.raises(ValueError, match=r"\(12\) must be a multiple of the local batch \(5\)"):
        BatchStream(pipeline, batch=12, micro_batch=5, rank=0, ranks=1)


def test_the_digests_of_a_step_are_those_of_its_sequences(tmp_path: Path, tokenizer: Path) -> None:
    pipeline = golden_pipeline(tmp_path, tokenizer, "first_fit")
    seen: list[str] = []
    streams = batch_streams(pipeline, batch=12, run=Run(1, 3))
    streams[0]._on_step = lambda number, step, before: seen.append(
        hashlib.sha256(b"".join(step.digests)).hexdigest()
    )
    want: list[Any] = [digest(take_step(streams, batch=12, micro_batch=1)) for _ in range(3)]
    streams[0].close()
    assert seen == want
