"""The global order: which sequences each optimizer step takes, and a rank's share of them.

Sequence ``i`` of the run is number ``i // L`` of lane ``i % L``. A step takes the next ``B``
sequences; inside it they are ordered by (lane, number), and rank ``g`` of ``G`` takes the ``g``-th
slice of ``B / G``. So what a step holds depends on neither ``G`` nor anything else that may change.
"""

import functools
import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchtitan_zephon.lane import Cursor, Lane
from torchtitan_zephon.ops.documents import Rows, lay_out, padding_row
from torchtitan_zephon.ops.functions import ProcessRunner, apply_functions, end_with_parent
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.state import next_number

_LAID_OUT_TOGETHER = 1 << 16  # tokens


def step_slice(
    first: int, batch: int, lanes: int, rank: int, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lanes and sequence numbers, int64 [batch / ranks] each, that one rank takes of a step.

    ``first`` is the count of sequences that earlier steps consumed.
    """
    # Whole rounds over the lanes that are behind move the numbers on, and change nothing else.
    lane, number = _slice_from(first % lanes, batch, lanes, rank, ranks)
    return lane, number + first // lanes


@functools.lru_cache(maxsize=256)
def _slice_from(
    first: int, batch: int, lanes: int, rank: int, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    every, over = divmod(batch, lanes)
    # Lanes from first % lanes on, around the end, have one sequence more where it does not divide.
    counts = every + ((np.arange(lanes) - first) % lanes < over)
    ends = np.cumsum(counts)
    place = np.arange(rank * (batch // ranks), (rank + 1) * (batch // ranks))
    lane = np.searchsorted(ends, place, side="right")
    return lane, next_number(first, lane, lanes) + place - (ends - counts)[lane]


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
    """SHA-256 of one sequence: inputs, labels and positions, [seq_len], as little-endian int32."""
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
        # The number of the segment's first sequence; before there is a segment, of one behind it.
        self._first = (lane.cursor.segment - 1) * self._size
        self._order: list[int] = []
        self._entries: dict[int, str] = {}
        self.rows: Rows
        """The segment's rows."""
        self.tokens: list[list[tuple[int, int]]] = []
        """For each row, which datasets' tokens are in it, and how many."""
        self._note(lane.cursor)

    def _note(self, cursor: Cursor) -> None:
        self._entries = {s: t for s, t in self._entries.items() if s >= cursor.segment - 1}
        self._entries[cursor.segment] = cursor.to_json()

    def lacks(self, number: int) -> bool:
        """Whether sequence ``number`` is of a segment that is not made yet."""
        return number - self._first >= self._size

    def row(self, number: int) -> int | None:
        """Which row of the segment, then in ``rows``, is sequence ``number``; None past the end.

        Asked for in rising order, since segments that are behind are not kept.
        """
        if self.lacks(number):
            self._produce_to(number // self._size)
        place = number - self._first
        assert place >= 0, "a lane is read forwards only"
        return self._order[place] if place < len(self._order) else None

    def entry(self, segment: int) -> str:
        """The JSON of the cursor at the start of a segment."""
        self._produce_to(segment - 1)
        return self._entries[segment]

    def _produce_to(self, segment: int) -> None:
        while self._lane.cursor.segment <= segment:
            cursor = self._lane.cursor
            self.rows = self._lane.produce(self._size)
            self.tokens = _tokens_by_row(self.rows, len(self._pipeline.datasets))
            self._first = cursor.segment * self._size
            order = self._pipeline.emission_order(cursor.lane, self._first, len(self.rows))
            self._order = order.tolist()
            self._note(self._lane.cursor)


def _tokens_by_row(made: Rows, datasets: int) -> list[list[tuple[int, int]]]:
    """For each row, which datasets' tokens are in it, and how many."""
    row, dataset, start, stop = (made.pieces[:, i] for i in (0, 2, 6, 7))
    counts = np.bincount(row * datasets + dataset, stop - start, len(made) * datasets)
    some = np.flatnonzero(counts)
    tokens: list[list[tuple[int, int]]] = [[] for _ in range(len(made))]
    for at, count in zip(some.tolist(), counts[some].astype(np.int64).tolist(), strict=True):
        tokens[at // datasets].append((at % datasets, count))
    return tokens


@dataclass(frozen=True)
class Step:
    """One rank's share of one optimizer step."""

    batches: list[np.ndarray]
    """Microbatches: inputs, labels and positions, int64 [3, micro_batch, seq_len] each."""
    digests: list[bytes]
    """SHA-256 of each sequence; empty when they were not asked for."""
    tokens: list[int]
    """Trained tokens of each dataset."""
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
        micro_batch: int,
        rank: int,
        ranks: int,
        consumed: int,
        cursors: dict[int, Cursor],
        digests: bool,
    ):
        self._micro_batch = micro_batch
        self._pipeline, self._batch, self._rank, self._ranks = pipeline, batch, rank, ranks
        self._consumed, self._digests = consumed, digests
        runtime, apply = pipeline.recipe.runtime, apply_functions
        self._threads = self._makers = self._processes = None
        if runtime.threads > 1 and runtime.runner != "inline":
            self._threads = ThreadPoolExecutor(runtime.threads, "zephon-worker")
            # A pool of its own: a lane that is made waits for blocks that the others read.
            self._makers = ThreadPoolExecutor(runtime.threads, "zephon-lane")
        if runtime.runner == "processes" and pipeline.functions:
            # Spawned, not forked: the training process has threads, and an accelerator perhaps.
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(
                runtime.threads, mp_context=context, initializer=end_with_parent
            )
            apply = ProcessRunner(self._processes, runtime.threads)
        self._padding = padding_row(pipeline.recipe.seq_len, pipeline.pad_id)
        finite = pipeline.recipe.finite
        self._readers = {
            lane: _LaneReader(pipeline, pipeline.lane(cursors[lane], self._threads, apply))
            for lane in lanes_of_rank(batch, pipeline.lanes, rank, ranks, consumed, finite)
        }
        self._same_until = 0  # sequences consumed, up to which the entries stay as they are
        self._entries: dict[int, tuple[int, str]] = {}

    def close(self) -> None:
        """End the worker threads and processes."""
        for pool in (self._makers, self._threads, self._processes):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _entries_at(self, consumed: int) -> dict[int, tuple[int, str]]:
        """For each lane of the rank: the segment of its next sequence and that segment's cursor.

        The same dict again as long as no lane comes to another segment.
        """
        if consumed >= self._same_until:
            lanes, of_run = np.array([*self._readers], dtype=np.int64), self._pipeline.lanes
            size = self._pipeline.segment_rows
            due = next_number(consumed, lanes, of_run) // size
            self._entries = dict(self._entries)
            for lane, segment in zip(lanes.tolist(), due.tolist(), strict=True):
                if self._entries.get(lane, (-1, ""))[0] != segment:
                    self._entries[lane] = segment, self._readers[lane].entry(segment)
            # The sequence before the next segment's first is number (due + 1) * size - 1.
            self._same_until = int((((due + 1) * size - 1) * of_run + lanes + 1).min())
        return self._entries

    def take(self, count: int) -> list[Step]:
        """The next ``count`` steps; fewer where the data ends.

        Small steps cost less when several are made together.
        """
        pipeline, picks, made = self._pipeline, [], []
        while len(made) < count and not self._ended():
            lane, number = step_slice(
                self._consumed, self._batch, pipeline.lanes, self._rank, self._ranks
            )
            tokens = [0] * len(pipeline.datasets)
            wanted = [*zip(lane.tolist(), number.tolist(), strict=True)]
            self._make_together(wanted)
            for at_lane, at_number in wanted:
                reader = self._readers[at_lane]
                row = reader.row(at_number)
                if row is None:
                    picks.append((self._padding, 0))
                else:
                    picks.append((reader.rows, row))
                    for dataset, count_there in reader.tokens[row]:
                        tokens[dataset] += count_there
            self._consumed += self._batch
            made.append((tokens, self._consumed, self._entries_at(self._consumed)))
        micro, seq_len = self._micro_batch, pipeline.recipe.seq_len
        batches: list[np.ndarray] = []
        digests: list[bytes] = []
        # Some microbatches at a time: what is at hand stays in the processor's cache, and no array
        # is so large that the system maps its memory anew each time.
        together = micro * max(1, _LAID_OUT_TOGETHER // (micro * seq_len))
        for at in range(0, len(picks), together):
            some = picks[at : at + together]
            if self._digests:
                out = lay_out(some, seq_len, np.int32)
                digests += [sequence_digest(*out[:, i]) for i in range(len(some))]
                out = out.astype(np.int64)
            else:
                out = lay_out(some, seq_len, np.int64)
            batches += [out[:, i : i + micro] for i in range(0, len(some), micro)]
        rows, steps = self._batch // self._ranks, []
        for i, (tokens, consumed, entries) in enumerate(made):
            mine = batches[i * (rows // micro) : (i + 1) * (rows // micro)]
            theirs = digests[i * rows : (i + 1) * rows]
            steps.append(Step(mine, theirs, tokens, consumed, entries))
        return steps

    def _make_together(self, wanted: list[tuple[int, int]]) -> None:
        """Make what the first sequence (lane, number) of each lane needs, several lanes at a time.

        Not the others: they may be of the segment behind, and a reader holds one.
        """
        if self._makers is None:
            return
        first: dict[int, int] = {}
        for lane, number in wanted:
            first.setdefault(lane, number)
        readers = [(self._readers[lane], number) for lane, number in first.items()]
        made = [self._makers.submit(r.row, number) for r, number in readers if r.lacks(number)]
        for one in made:
            one.result()

    def _ended(self) -> bool:
        """Whether a finite run has no sequence left, in any lane, at the start of the next step."""
        if not self._pipeline.recipe.finite:
            return False
        lanes = self._pipeline.lanes
        due = [(lane, int(next_number(self._consumed, lane, lanes))) for lane in self._readers]
        self._make_together(due)
        return all(self._readers[lane].row(number) is None for lane, number in due)
