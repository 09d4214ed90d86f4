"""The one way in which tests say "the same stream"."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.recipe import auto_lanes, parse_recipe
from torchtitan_zephon.stream import BatchStream


@dataclass(frozen=True)
class Run:
    """A stretch of training between two checkpoints."""

    ranks: int
    steps: int
    micro_batch: int = 1


def make_pipeline(
    table: dict[str, Any], *, seq_len: int, tokenizer: Path, batch: int = 1, **changes: Any
) -> Pipeline:
    """The pipeline of a ``[zephon]`` table; ``auto`` lanes are those of ``batch``.

    Its segments are as short as the shuffle buffer, so that a few steps cross many of them; that
    their length does not matter is a law of its own.
    """
    table = {"lanes": auto_lanes(batch), **table, **changes}
    pipeline = Pipeline(parse_recipe(table, seq_len=seq_len, tokenizer_path=str(tokenizer)))
    pipeline.segment_rows = pipeline.shuffled_rows
    return pipeline


def batch_streams(pipeline: Pipeline, *, batch: int, run: Run) -> list[BatchStream]:
    """One stream for each rank."""
    return [
        BatchStream(pipeline, batch=batch, micro_batch=run.micro_batch, rank=rank, ranks=run.ranks)
        for rank in range(run.ranks)
    ]


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What a distributed checkpoint makes of the ranks' states, through a JSON round trip.

    Ranks that save the same lane must save the same entry, for one of them is kept.
    """
    merged: dict[str, Any] = {"meta": states[0]["meta"], "lane": {}}
    for state in states:
        assert state["meta"] == merged["meta"]
        for lane, entry in state["lane"].items():
            assert merged["lane"].setdefault(lane, entry) == entry
    return json.loads(json.dumps(merged))


def take_step(streams: list[BatchStream], *, batch: int, micro_batch: int) -> list[np.ndarray]:
    """The global batch as int32 arrays [3, seq_len] (inputs, labels, positions) in step order."""
    rows = []
    for stream in streams:
        for _ in range(batch // len(streams) // micro_batch):
            parts = next(stream)
            assert all(p.dtype == np.int64 and len(p) == micro_batch for p in parts)
            rows += [np.stack(row).astype("<i4") for row in zip(*parts, strict=True)]
    assert len(rows) == batch
    return rows


def digest(rows: list[np.ndarray]) -> str:
    """The global batch's SHA-256, written out here once more, independently of the package."""
    each = [hashlib.sha256(row.tobytes()).digest() for row in rows]
    return hashlib.sha256(b"".join(each)).hexdigest()


def global_batches(pipeline: Pipeline, *, batch: int, runs: list[Run]) -> list[str]:
    """The digests of all steps of ``runs``, each resumed from the state that the last one saved."""
    digests: list[str] = []
    saved: dict[str, Any] | None = None
    for run in runs:
        streams = batch_streams(pipeline, batch=batch, run=run)
        if saved is not None:
            for stream in streams:
                stream.load_state_dict(saved)
            # Loading and saving at once changes nothing, whatever the ranks are now.
            assert merge_states([s.state_dict() for s in streams]) == saved
        for _ in range(run.steps):
            digests.append(digest(take_step(streams, batch=batch, micro_batch=run.micro_batch)))
        saved = merge_states([s.state_dict() for s in streams])
        for stream in streams:
            stream.close()
    return digests


def assert_same_stream(pipeline: Pipeline, *, batch: int, runs: list[Run]) -> list[str]:
    """Resumed ``runs`` have the global batches of one rank that never stopped; returns those."""
    steps = sum(run.steps for run in runs)
    expected = global_batches(pipeline, batch=batch, runs=[Run(ranks=1, steps=steps)])
    assert global_batches(pipeline, batch=batch, runs=runs) == expected
    return expected
