"""The global order: which sequences each optimizer step takes, and a rank's share of them.

Sequence ``i`` of the run is number ``i // L`` of lane ``i % L``. A step takes the next ``B``
sequences; inside it they are ordered by (lane, number), and rank ``g`` of ``G`` takes the ``g``-th
slice of ``B / G``. So what a step holds depends on neither ``G`` nor anything else that may change.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_zephon.lane import Cursor, Lane
from torchtitan_zephon.ops.documents import IGNORE_LABEL, Rows
from torchtitan_zephon.ops.shuffle import emission_order
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.state import next_number, read_cursors, read_meta, save_state

logger = logging.getLogger(__name__)


def step_slice(
    first: int, batch: int, lanes: int, rank: int, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lanes and sequence numbers, int64 [batch / ranks] each, that one rank takes of a step.

    ``first`` is the count of sequences that earlier steps consumed.
    """
    i = np.arange(first, first + batch)
    lane, number = i % lanes, i // lanes
    order = np.lexsort((number, lane))
    mine = order[rank * (batch // ranks) : (rank + 1) * (batch // ranks)]
    return lane[mine], number[mine]


def lanes_of_rank(
    batch: int, lanes: int, rank: int, ranks: int, first: int | None = None
) -> list[int]:
    """The lanes that a rank's slices touch in any step of a run.

    ``first`` is where the run starts; None means that it is not known yet, and gives the lanes for
    every place where it may start.
    """
    if batch % lanes == 0:
        starts = [0]  # every step takes the same number of each lane, wherever it starts
    elif first is None:
        starts = range(lanes)
    else:
        starts = range(first % np.gcd(batch, lanes), lanes, np.gcd(batch, lanes))
    return sorted({int(x) for s in starts for x in step_slice(s, batch, lanes, rank, ranks)[0]})


def sequence_digest(inputs: np.ndarray, labels: np.ndarray, positions: np.ndarray) -> bytes:
    """SHA-256 of one sequence: its three int32 rows [seq_len], little-endian, one after another."""
    digest = hashlib.sha256()
    for row in (inputs, labels, positions):
        digest.update(np.ascontiguousarray(row, dtype="<i4").data)
    return digest.digest()


class _LaneReader:
    """One lane of a rank, read by sequence number; it holds one segment at a time."""

    def __init__(self, pipeline: Pipeline, lane: Lane):
        self._pipeline = pipeline
        self._lane = lane
        self._size = pipeline.segment_rows
        self._rows: Rows | None = None
        self._order = np.empty(0, dtype=np.int64)
        self._entries: dict[int, str] = {}
        self._note(lane.cursor)

    def _note(self, cursor: Cursor) -> None:
        self._entries = {s: t for s, t in self._entries.items() if s >= cursor.segment - 1}
        self._entries[cursor.segment] = cursor.to_json()

    def row(self, number: int) -> tuple[Rows, int] | None:
        """The rows that sequence ``number`` lies in, and which of them it is; None past the end.

        Asked for in rising order, since segments that are behind are not kept.
        """
        segment, place = divmod(number, self._size)
        self._produce_to(segment)
        assert self._lane.cursor.segment == segment + 1, "a lane is read forwards only"
        if place >= len(self._order):
            return None
        assert self._rows is not None
        return self._rows, int(self._order[place])

    def entry(self, number: int) -> tuple[int, str]:
        """The segment that ``number`` lies in, and the JSON of the cursor at its start."""
        segment = number // self._size
        self._produce_to(segment - 1)
        return segment, self._entries[segment]

    def _produce_to(self, segment: int) -> None:
        while self._lane.cursor.segment <= segment:
            cursor = self._lane.cursor
            self._rows = self._lane.produce(self._size)
            self._order = emission_order(
                self._pipeline.recipe.shuffle,
                self._pipeline.recipe.seed,
                cursor.lane,
                cursor.segment,
                len(self._rows.inputs),
            )
            self._note(self._lane.cursor)


@dataclass(frozen=True)
class Step:
    """One rank's share of one optimizer step."""

    inputs: np.ndarray
    """Token ids, int64 [batch / ranks, seq_len]."""
    labels: np.ndarray
    """Next tokens, ``IGNORE_LABEL`` where there is none, int64 [batch / ranks, seq_len]."""
    positions: np.ndarray
    """Positions in the document, int64 [batch / ranks, seq_len]."""
    digests: list[bytes]
    """SHA-256 of each sequence; empty when they were not asked for."""
    tokens: np.ndarray
    """Trained tokens of each dataset, int64 [datasets]."""
    consumed: int
    """Sequences of the run up to and with this step."""
    entries: dict[int, tuple[int, str]]
    """For each lane of the rank after this step: segment, and its cursor's JSON."""


class Steps:
    """The steps of one rank, from a saved place on, made one after another in one thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        batch: int,
        rank: int,
        ranks: int,
        consumed: int,
        cursors: dict[int, Cursor],
        digests: bool,
    ):
        self._pipeline, self._batch, self._rank, self._ranks = pipeline, batch, rank, ranks
        self._consumed, self._digests = consumed, digests
        threads = pipeline.recipe.runtime.threads
        self._pool = ThreadPoolExecutor(threads, "zephon-worker") if threads > 1 else None
        self._readers = {
            lane: _LaneReader(pipeline, pipeline.lane(cursors[lane], self._pool))
            for lane in lanes_of_rank(batch, pipeline.lanes, rank, ranks, consumed)
        }

    def close(self) -> None:
        """End the worker threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def entries(self, consumed: int) -> dict[int, tuple[int, str]]:
        """For each lane of the rank: the segment of its next sequence and that segment's cursor."""
        lanes = self._pipeline.lanes
        return {
            lane: reader.entry(next_number(consumed, lane, lanes))
            for lane, reader in self._readers.items()
        }

    def __iter__(self) -> Iterator[Step]:
        while True:
            step = self._next()
            if step is None:
                return
            yield step

    def _next(self) -> Step | None:
        if self._ended():
            return None
        pipeline = self._pipeline
        lane, number = step_slice(
            self._consumed, self._batch, pipeline.lanes, self._rank, self._ranks
        )
        shape = (len(lane), pipeline.recipe.seq_len)
        pad_id = pipeline.tokenizer.eos_id or 0
        inputs = np.full(shape, pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_LABEL, dtype=np.int64)
        positions = np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1))
        tokens = np.zeros(len(pipeline.datasets), dtype=np.int64)
        digests = []
        for i, (at_lane, at_number) in enumerate(zip(lane.tolist(), number.tolist(), strict=True)):
            found = self._readers[at_lane].row(at_number)
            if found is not None:
                rows, row = found
                inputs[i], labels[i] = rows.inputs[row], rows.labels[row]
                positions[i] = rows.positions[row]
                lo, hi = np.searchsorted(rows.pieces[:, 0], [row, row + 1])
                mine = rows.pieces[lo:hi]
                np.add.at(tokens, mine[:, 2], mine[:, 7] - mine[:, 6])
                if self._digests:
                    digests.append(
                        sequence_digest(rows.inputs[row], rows.labels[row], rows.positions[row])
                    )
            elif self._digests:
                digests.append(sequence_digest(inputs[i], labels[i], positions[i]))
        self._consumed += self._batch
        return Step(
            inputs,
            labels,
            positions,
            digests,
            tokens,
            self._consumed,
            self.entries(self._consumed),
        )

    def _ended(self) -> bool:
        """Whether a finite run has no sequence left at the start of the next step, on any rank.

        Only with one lane does a rank see the whole stream, and finite runs have one lane.
        """
        if self._pipeline.recipe.passes is None:
            return False
        assert self._pipeline.lanes == 1
        return self._readers[0].row(self._consumed) is None


class BatchStream:
    """One rank's microbatches, with steps prepared ahead in a thread, and a state to save.

    Iterating yields ``(inputs, labels, positions)``, int64 [micro_batch, seq_len] each. A second
    ``for`` goes on where the first one stopped. The state describes the last complete step: a step
    counts from the moment its last microbatch is handed out.

    Args:
        pipeline: what to read.
        batch: sequences of an optimizer step over all ranks, ``B``.
        micro_batch: sequences handed out at a time; ``B`` is a multiple of it times ``ranks``.
        rank, ranks: this data-parallel rank and how many there are.
        on_step: called when a step is complete, in the thread that iterates, with its number
            (from 1), the step, and the lanes' entries as they were before it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        batch: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        digests: bool = True,
        on_step: Callable[[int, Step, dict[int, tuple[int, str]]], None] | None = None,
    ):
        if batch % (micro_batch * ranks) != 0:
            raise ValueError(
                f"the global batch ({batch}) must be a multiple of the local batch ({micro_batch}) "
                f"times the data-parallel ranks ({ranks})"
            )
        self.pipeline = pipeline
        self._batch, self._micro_batch = batch, micro_batch
        self._rank, self._ranks = rank, ranks
        self._with_digests = digests
        self._on_step = on_step
        self.consumed = 0
        """Sequences of the run up to the last complete step."""
        self.steps = 0
        """Optimizer steps of the run up to and with the last complete one."""
        # Asked for before anything is loaded, the state names every lane that may turn out to be
        # this rank's: checkpoint readers ask for the keys that it has.
        lanes = lanes_of_rank(batch, pipeline.lanes, rank, ranks)
        self._cursors = {lane: pipeline.start(lane) for lane in lanes}
        self._entries = _entries_of(self._cursors)
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._steps: Steps | None = None
        self._source: Iterator[Step] | None = None
        self._producer: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Step | None]] = deque()
        self._step: Step | None = None
        self._given = 0
        self._error: BaseException | None = None
        self._closed = self._exhausted = False

    # -- iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._closed:
            raise RuntimeError("the data loader is closed")
        if self._step is None:
            self._step = self._take()
            if self._step is None:
                raise StopIteration
            self._given = 0
        step = self._step
        part = slice(self._given, self._given + self._micro_batch)
        self._given += self._micro_batch
        if self._given == len(step.inputs):
            before = self._entries
            self._step = None
            self.steps, self.consumed, self._entries = self.steps + 1, step.consumed, step.entries
            if self._on_step is not None:
                self._on_step(self.steps, step, before)
        return step.inputs[part], step.labels[part], step.positions[part]

    def _take(self) -> Step | None:
        # An error, and the end, are final: whoever asks again is told again.
        if self._error is not None:
            raise self._error
        if self._exhausted:
            return None
        if self._producer is None:
            self._producer = ThreadPoolExecutor(1, "zephon-producer")
            for _ in range(self.pipeline.recipe.runtime.prefetch_steps):
                self._ahead.append(self._producer.submit(self._produce))
        try:
            step = self._ahead.popleft().result()
        except BaseException as error:
            self._error = error
            raise
        self._ahead.append(self._producer.submit(self._produce))
        self._exhausted = step is None
        return step

    def _produce(self) -> Step | None:
        # Always in the one producer thread, so steps are made in order and one at a time.
        if self._source is None:
            self._steps = self._new_steps()
            self._source = iter(self._steps)
        return next(self._source, None)

    def _new_steps(self) -> Steps:
        return Steps(
            self.pipeline,
            batch=self._batch,
            rank=self._rank,
            ranks=self._ranks,
            consumed=self.consumed,
            cursors=self._cursors,
            digests=self._with_digests,
        )

    def close(self) -> None:
        """End the threads; safe to call twice, and after an error."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if self._producer is not None:
            self._producer.shutdown(wait=True, cancel_futures=True)
        if self._steps is not None:
            self._steps.close()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``meta`` and one entry for each lane of this rank, all of them JSON strings."""
        if self._step is not None and not self._warned:
            self._warned = True
            logger.warning(
                "state_dict() was called between the microbatches of a step; it describes the last "
                "complete step, so the %d sequences of this one that are handed out already will "
                "be handed out again after a resume",
                self._given,
            )
        return save_state(self.pipeline, self.steps, self.consumed, self._entries)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that ``state_dict`` of any rank count gave.

        Raises:
            StateError: an entry is missing or damaged, or the recipe is another one.
        """
        pipeline = self.pipeline
        meta = read_meta(state, pipeline)
        lanes = lanes_of_rank(
            self._batch, pipeline.lanes, self._rank, self._ranks, meta["sequences"]
        )
        self._cursors = read_cursors(state, meta, pipeline, lanes)
        self._stop()
        self._reset()
        self.steps, self.consumed = meta["steps"], meta["sequences"]
        self._entries = _entries_of(self._cursors)


def _entries_of(cursors: dict[int, Cursor]) -> dict[int, tuple[int, str]]:
    return {lane: (cursor.segment, cursor.to_json()) for lane, cursor in cursors.items()}
