"""What every rank of a run would be given, with no ranks: a reference run and resumes of it.

A rank only selects from the lanes, so the lanes of an arm are made once and each rank's selection
is taken from them, through the state that the reference saved. ``honest`` makes a whole
``BatchStream`` for each rank instead. Of more than 64 ranks a sample is looked at, and a reference
on more is one stream.
"""

import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torchtitan_zephon.audit.replay import LaneReader
from torchtitan_zephon.lane import Cursor
from torchtitan_zephon.order import derive_key, permute
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.state import read_cursors, read_meta
from torchtitan_zephon.steps import lanes_of_rank, sequence_digest, step_slice
from torchtitan_zephon.stream import BatchStream

ALL_RANKS_UP_TO = 64


@dataclass
class Arm:
    """A run, or the resume of one."""

    ranks: int
    looked_at: list[int]
    """The ranks whose batches were made."""
    first_step: int
    digests: dict[int, str] = field(default_factory=dict)
    """SHA-256 of each global batch, or of the reference's where the sampled ranks agree with it."""
    differing: list[int] = field(default_factory=list)
    wrong_ranks: list[int] = field(default_factory=list)
    """Ranks that were given other sequences, in the first differing step."""

    @property
    def sampled(self) -> bool:
        """Whether only some ranks were looked at."""
        return len(self.looked_at) < self.ranks

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "ranks": self.ranks,
            "ranks_looked_at": len(self.looked_at),
            "first_step": self.first_step,
            "steps": len(self.digests),
            "same": not self.differing,
            "differing_steps": self.differing,
            "wrong_ranks": self.wrong_ranks,
        }


def simulate(
    pipeline: Pipeline,
    *,
    batch: int,
    ranks: int,
    resume: list[int],
    at: int,
    steps: int,
    sample_ranks: int = 16,
    honest: bool = False,
    on_arm: Callable[[str], None] = lambda name: None,
) -> list[Arm]:
    """The reference run on ``ranks`` ranks, then a resume at step ``at`` on each of ``resume``.

    Args:
        batch: sequences of an optimizer step.
        sample_ranks: ranks looked at where an arm has more than 64.
        on_arm: told the name of each arm before it is made.

    Raises:
        ValueError: numbers that do not fit, all of them at once.
    """
    faults = [
        f"{n} ranks: the global batch of {batch} cannot be shared out evenly"
        for n in dict.fromkeys([ranks, *resume])
        if n < 1 or batch % n != 0
    ]
    if not 0 <= at < steps:
        faults.append(f"--at {at} --steps {steps}: a resume must leave a step to compare")
    if sample_ranks < 1:
        faults.append(f"--sample-ranks {sample_ranks}: must be 1 or more")
    if faults:
        raise ValueError("; ".join(faults))
    on_arm(f"reference on {ranks} ranks, {steps} steps")
    reference, sequences, saved = _reference(pipeline, batch, ranks, at, steps, honest)
    arms = [reference]
    for number in resume:
        on_arm(f"resumed at step {at} on {number} ranks")
        arm = Arm(number, _sample(number, sample_ranks), at + 1)
        made = (
            _honest(pipeline, batch, arm, saved) if honest else _shared(pipeline, batch, arm, saved)
        )
        size = batch // number
        for step in range(at + 1, steps + 1):
            expected = sequences[step]
            got = next(made)
            wrong = [
                rank
                for rank in arm.looked_at
                if got[rank] != expected[rank * size : (rank + 1) * size]
            ]
            seen = [d for rank in arm.looked_at for d in got[rank]]
            arm.digests[step] = reference.digests[step]
            if wrong:
                arm.digests[step] = _digest(seen)
                arm.wrong_ranks = arm.wrong_ranks or wrong
                arm.differing.append(step)
        made.close()
        arms.append(arm)
    return arms


def _digest(sequences: list[bytes]) -> str:
    return hashlib.sha256(b"".join(sequences)).hexdigest()


def _sample(ranks: int, count: int) -> list[int]:
    """The first rank, the last, and others by chance that is the same every time."""
    if ranks <= ALL_RANKS_UP_TO or count >= ranks:
        return list(range(ranks))
    key = derive_key("ranks to look at", ranks)
    others = (permute(i, ranks, key) for i in range(ranks))
    chosen = dict.fromkeys([0, ranks - 1])
    for rank in others:
        if len(chosen) >= count:
            break
        chosen[rank] = None
    return sorted(list(chosen)[:count])


_Step = dict[int, list[bytes]]  # of each rank, its sequences' digests


def _reference(
    pipeline: Pipeline, batch: int, ranks: int, at: int, steps: int, honest: bool
) -> tuple[Arm, dict[int, list[bytes]], dict[str, Any]]:
    arm = Arm(ranks, list(range(ranks)), 1)
    sequences: dict[int, list[bytes]] = {}
    # All of the global batch is needed; a stream for each of thousands of ranks would not fit.
    parts = ranks if honest and ranks <= ALL_RANKS_UP_TO else 1
    streams = _streams(pipeline, batch, parts, list(range(parts)))
    saved: dict[str, Any] = {}
    try:
        for step in range(steps + 1):
            if step == at:
                # As a checkpoint holds it: text, merged from what the ranks save.
                states = [stream.state_dict() for stream in streams.values()]
                lanes = {k: v for state in states for k, v in state["lane"].items()}
                saved = json.loads(json.dumps({"meta": states[0]["meta"], "lane": lanes}))
            if step == steps:
                break
            try:
                made = [d for stream in streams.values() for d in _take(stream)]
            except StopIteration:
                raise ValueError(f"the data ends after {step} steps") from None
            arm.digests[step + 1] = _digest(made)
            if step >= at:
                sequences[step + 1] = made
    finally:
        for stream in streams.values():
            stream.close()
    return arm, sequences, saved


def _streams(
    pipeline: Pipeline, batch: int, ranks: int, wanted: list[int]
) -> dict[int, BatchStream]:
    return {
        rank: BatchStream(
            pipeline,
            batch=batch,
            micro_batch=batch // ranks,
            rank=rank,
            ranks=ranks,
            digests=False,
        )
        for rank in wanted
    }


def _take(stream: BatchStream) -> list[bytes]:
    """Digests of a rank's next step, of the very arrays that training would be given."""
    return [sequence_digest(*rows) for rows in zip(*next(stream), strict=True)]


def _honest(pipeline: Pipeline, batch: int, arm: Arm, saved: dict[str, Any]) -> Generator[_Step]:
    streams = _streams(pipeline, batch, arm.ranks, arm.looked_at)
    try:
        for stream in streams.values():
            stream.load_state_dict(saved)
        while True:
            yield {rank: _take(stream) for rank, stream in streams.items()}
    finally:
        for stream in streams.values():
            stream.close()


def _shared(pipeline: Pipeline, batch: int, arm: Arm, saved: dict[str, Any]) -> Generator[_Step]:
    """Each rank's selection, the lanes that the ranks have in common made once."""
    meta = read_meta(saved, pipeline)
    first = meta["sequences"]
    finite = pipeline.recipe.finite
    of_rank = {
        rank: lanes_of_rank(batch, pipeline.lanes, rank, arm.ranks, first, finite)
        for rank in arm.looked_at
    }
    cursors: dict[int, Cursor] = {}
    for lanes in of_rank.values():  # every rank reads its own entries of the state
        cursors |= read_cursors(saved, meta, pipeline, lanes)
    readers = {lane: LaneReader(pipeline, cursor) for lane, cursor in cursors.items()}
    while True:
        step: _Step = {}
        for rank, known in of_rank.items():
            lanes, numbers = step_slice(first, batch, pipeline.lanes, rank, arm.ranks)
            assert set(lanes.tolist()) <= set(known), f"rank {rank} does not know all its lanes"
            places = zip(lanes.tolist(), numbers.tolist(), strict=True)
            step[rank] = [readers[lane].sequence(number).digest for lane, number in places]
        yield step
        first += batch
