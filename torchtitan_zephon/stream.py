"""The global order: which sequences each optimizer step takes, and a rank's share of them.

Sequence ``i`` of the run is number ``i // L`` of lane ``i % L``. A step takes the next ``B``
sequences; inside it they are ordered by (lane, number), and rank ``g`` of ``G`` takes the ``g``-th
slice of ``B / G``. So what a step holds depends on neither ``G`` nor anything else that may change.
"""

import hashlib
import itertools
import logging
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_zephon.lane import Cursor, Lane
from torchtitan_zephon.ops.documents import IGNORE_LABEL, Rows
from torchtitan_zephon.ops.functions import ProcessRunner, activities, apply_functions
from torchtitan_zephon.ops.shuffle import emission_order
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.state import next_number, read_cursors, read_meta, save_state

logger = logging.getLogger(__name__)

_HAND_OVER_TOKENS = 1 << 17
_MOST_TOGETHER = 8


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
    batch: int, lanes: int, rank: int, ranks: int, first: int | None = None, finite: bool = False
) -> list[int]:
    """The lanes that a rank's slices touch in any step of a run.

    Of a ``finite`` run it is all lanes: no rank may end before the last lane does, and how many
    rows a lane has is known only to who makes them.

    ``first`` is where the run starts; None means that it is not known yet, and gives the lanes for
    every place where it may start.
    """
    if finite:
        return list(range(lanes))
    if batch % lanes == 0:
        starts = [0]  # every step takes the same number of each lane, wherever it starts
    elif first is None:
        starts = range(lanes)
    else:
        starts = range(first % np.gcd(batch, lanes), lanes, np.gcd(batch, lanes))
    return sorted({int(x) for s in starts for x in step_slice(s, batch, lanes, rank, ranks)[0]})


def sequence_digest(*rows: np.ndarray) -> bytes:
    """SHA-256 of one sequence: inputs, labels and positions in a row, as little-endian int32.

    Given as three arrays [seq_len] or as one [3, seq_len].
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.ascontiguousarray(row, dtype="<i4").data)
    return digest.digest()


class _LaneReader:
    """One lane of a rank, read by sequence number; it holds one segment at a time."""

    def __init__(self, pipeline: Pipeline, lane: Lane):
        self._pipeline = pipeline
        self._lane = lane
        self._size = pipeline.segment_rows
        self._order: list[int] = []
        self._entries: dict[int, str] = {}
        self.rows = np.empty((0, 3, 0), dtype=np.int32)
        """The segment's inputs, labels and positions, int32 [rows, 3, seq_len]."""
        self.tokens = np.empty((0, 0), dtype=np.int64)
        """Tokens of each dataset in each row, int64 [rows, datasets]."""
        self._note(lane.cursor)

    def _note(self, cursor: Cursor) -> None:
        self._entries = {s: t for s, t in self._entries.items() if s >= cursor.segment - 1}
        self._entries[cursor.segment] = cursor.to_json()

    def row(self, number: int) -> int | None:
        """Which row of the segment, then in ``rows``, is sequence ``number``; None past the end.

        Asked for in rising order, since segments that are behind are not kept.
        """
        segment, place = divmod(number, self._size)
        self._produce_to(segment)
        assert self._lane.cursor.segment == segment + 1, "a lane is read forwards only"
        return self._order[place] if place < len(self._order) else None

    def entry(self, number: int) -> tuple[int, str]:
        """The segment that ``number`` lies in, and the JSON of the cursor at its start."""
        segment = number // self._size
        self._produce_to(segment - 1)
        return segment, self._entries[segment]

    def _produce_to(self, segment: int) -> None:
        while self._lane.cursor.segment <= segment:
            cursor, recipe = self._lane.cursor, self._pipeline.recipe
            made = self._lane.produce(self._size)
            # One array of all three, so that a row is hashed and handed out in one piece.
            self.rows = np.stack([made.inputs, made.labels, made.positions], axis=1)
            self.tokens = _tokens_by_row(made, len(self._pipeline.datasets))
            order = emission_order(
                recipe.shuffle, recipe.seed, cursor.lane, cursor.segment, len(self.rows)
            )
            self._order = order.tolist()
            self._note(self._lane.cursor)


def _tokens_by_row(made: Rows, datasets: int) -> np.ndarray:
    """Tokens of each dataset in each row, int64 [rows, datasets]."""
    tokens = np.zeros((len(made.inputs), datasets), dtype=np.int64)
    row, dataset, start, stop = (made.pieces[:, i] for i in (0, 2, 6, 7))
    np.add.at(tokens, (row, dataset), stop - start)
    return tokens


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
        runtime, apply = pipeline.recipe.runtime, apply_functions
        self._threads = self._processes = None
        if runtime.threads > 1 and runtime.runner != "inline":
            self._threads = ThreadPoolExecutor(runtime.threads, "zephon-worker")
        if runtime.runner == "processes" and pipeline.functions:
            # Spawned, not forked: the training process has threads, and an accelerator perhaps.
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(runtime.threads, mp_context=context)
            apply = ProcessRunner(self._processes, runtime.threads)
        seq_len, finite = pipeline.recipe.seq_len, pipeline.recipe.finite
        self._padding = np.stack(
            [
                np.full(seq_len, pipeline.tokenizer.eos_id or 0, dtype=np.int32),
                np.full(seq_len, IGNORE_LABEL, dtype=np.int32),
                np.arange(seq_len, dtype=np.int32),
            ]
        )
        self._readers = {
            lane: _LaneReader(pipeline, pipeline.lane(cursors[lane], self._threads, apply))
            for lane in lanes_of_rank(batch, pipeline.lanes, rank, ranks, consumed, finite)
        }

    def close(self) -> None:
        """End the worker threads and processes."""
        for pool in (self._threads, self._processes):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

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
        sequences = np.empty((3, len(lane), pipeline.recipe.seq_len), dtype=np.int64)
        tokens = np.zeros(len(pipeline.datasets), dtype=np.int64)
        digests = []
        for i, (at_lane, at_number) in enumerate(zip(lane.tolist(), number.tolist(), strict=True)):
            reader = self._readers[at_lane]
            row = reader.row(at_number)
            if row is None:
                sequence = self._padding
            else:
                sequence = reader.rows[row]
                tokens += reader.tokens[row]
            sequences[:, i] = sequence
            if self._digests:
                digests.append(sequence_digest(sequence))
        self._consumed += self._batch
        inputs, labels, positions = sequences
        entries = self.entries(self._consumed)
        return Step(inputs, labels, positions, digests, tokens, self._consumed, entries)

    def _ended(self) -> bool:
        """Whether a finite run has no sequence left, in any lane, at the start of the next step."""
        if not self._pipeline.recipe.finite:
            return False
        lanes = self._pipeline.lanes
        return all(
            reader.row(next_number(self._consumed, lane, lanes)) is None
            for lane, reader in self._readers.items()
        )


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
        lanes = self._lanes(None)
        self._cursors = {lane: pipeline.start(lane) for lane in lanes}
        self._entries = _entries_of(self._cursors)
        self._warned = False
        self._reset()

    def _lanes(self, first: int | None) -> list[int]:
        pipeline = self.pipeline
        return lanes_of_rank(
            self._batch, pipeline.lanes, self._rank, self._ranks, first, pipeline.recipe.finite
        )

    def _reset(self) -> None:
        self._steps: Steps | None = None
        self._source: Iterator[Step] | None = None
        self._producer: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[list[Step | None]]] = deque()
        self._ready: deque[Step | None] = deque()
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
        if not self._ready:
            try:
                self._ready.extend(self._wait_for(self._ahead.popleft()))
            except BaseException as error:
                self._error = error
                raise
            self._ahead.append(self._producer.submit(self._produce))
        step = self._ready.popleft()
        self._exhausted = step is None
        return step

    def _wait_for(self, ahead: Future[list[Step | None]]) -> list[Step | None]:
        patience = self.pipeline.recipe.runtime.stall_warning_seconds
        while True:
            try:
                return ahead.result(timeout=patience)
            except TimeoutError:
                if ahead.done():
                    raise  # the loader's own, from storage say
                doing = "; ".join(activities()) or "reading or tokenizing"
                logger.warning("training has waited %g s for data; now: %s", patience, doing)

    def _produce(self) -> list[Step | None]:
        # Always in the one producer thread, so steps are made in order and one at a time. Small
        # steps are handed over a few together: a hand-over takes as long as making 4,000 tokens.
        if self._source is None:
            self._steps = self._new_steps()
            self._source = iter(self._steps)
        tokens = self._batch // self._ranks * self.pipeline.recipe.seq_len
        count = max(1, min(_MOST_TOGETHER, _HAND_OVER_TOKENS // tokens))
        steps: list[Step | None] = list(itertools.islice(self._source, count))
        return steps if len(steps) == count else [*steps, None]

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
        return self.last_state()

    def last_state(self) -> dict[str, Any]:
        """The state after the last complete step, whether or not a step is under way."""
        return save_state(self.pipeline, self.steps, self.consumed, self._entries)

    @property
    def given(self) -> int:
        """Microbatches of the step under way that are handed out."""
        return self._given // self._micro_batch if self._step is not None else 0

    def statistics(self) -> dict[str, int]:
        """Token and document counts of this rank's lanes, at the starts of their segments.

        ``read == trained + pending + dropped``, in (input, label) pairs.
        """
        cursors = [Cursor.from_json(text, lane) for lane, (_, text) in self._entries.items()]
        return {
            "read": sum(at[3] for c in cursors for _, at in c.positions),
            "trained": sum(c.trained for c in cursors),
            "pending": sum(r.stop - r.start for c in cursors for row in c.unfinished for r in row),
            "dropped": sum(c.dropped for c in cursors),
            "padding": sum(c.padding for c in cursors),
            "empty documents": sum(empty for c in cursors for empty, _ in c.left_out),
            "filtered documents": sum(filtered for c in cursors for _, filtered in c.left_out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that ``state_dict`` of any rank count gave.

        Raises:
            StateError: an entry is missing or damaged, or the recipe is another one.
        """
        pipeline = self.pipeline
        meta = read_meta(state, pipeline)
        lanes = self._lanes(meta["sequences"])
        self._cursors = read_cursors(state, meta, pipeline, lanes)
        self._stop()
        self._reset()
        self.steps, self.consumed = meta["steps"], meta["sequences"]
        self._entries = _entries_of(self._cursors)


def _entries_of(cursors: dict[int, Cursor]) -> dict[int, tuple[int, str]]:
    return {lane: (cursor.segment, cursor.to_json()) for lane, cursor in cursors.items()}
