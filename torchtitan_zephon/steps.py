"""The global order: which sequences each optimizer step takes, and a rank's share of them.

Sequence ``i`` of the run is number ``i // L`` of lane ``i % L``. A step takes the next ``B``
sequences; inside it they are ordered by (lane, number), and rank ``g`` of ``G`` takes the ``g``-th
slice of ``B / G``. So what a step holds depends on neither ``G`` nor anything else that may change.
"""

import hashlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchtitan_zephon.lane import Cursor, Lane
from torchtitan_zephon.ops.documents import IGNORE_LABEL, Rows
from torchtitan_zephon.ops.functions import ProcessRunner, apply_functions, end_with_parent
from torchtitan_zephon.ops.shuffle import emission_order
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.state import next_number


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
            self._processes = ProcessPoolExecutor(
                runtime.threads, mp_context=context, initializer=end_with_parent
            )
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
