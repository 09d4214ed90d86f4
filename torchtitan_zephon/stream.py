"""One rank's batches: steps prepared ahead in a thread, handed out in microbatches."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from torchtitan_zephon.lane import Cursor
from torchtitan_zephon.ops.functions import activities
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.state import read_cursors, read_meta, save_state
from torchtitan_zephon.steps import Step, Steps, lanes_of_rank

logger = logging.getLogger(__name__)

_HAND_OVER_TOKENS = 1 << 17
_MOST_TOGETHER = 8


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
        inputs, labels, positions = step.batches[self._given]
        self._given += 1
        if self._given == len(step.batches):
            before = self._entries
            self._step = None
            self.steps, self.consumed, self._entries = self.steps + 1, step.consumed, step.entries
            if self._on_step is not None:
                self._on_step(self.steps, step, before)
        return inputs, labels, positions

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
        if self._steps is None:
            self._steps = self._new_steps()
        tokens = self._batch // self._ranks * self.pipeline.recipe.seq_len
        count = max(1, min(_MOST_TOGETHER, _HAND_OVER_TOKENS // tokens))
        steps = self._steps.take(count)
        return [*steps] if len(steps) == count else [*steps, None]

    def _new_steps(self) -> Steps:
        return Steps(
            self.pipeline,
            batch=self._batch,
            micro_batch=self._micro_batch,
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
            self._steps = None  # with its files and segments

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``meta`` and one entry for each lane of this rank, all of them JSON strings."""
        if self._step is not None and not self._warned:
            self._warned = True
            logger.warning(
                "state_dict() was called between the microbatches of a step; it describes the last "
                "complete step, so the %d sequences of this one that are handed out already will "
                "be handed out again after a resume",
                self._given * self._micro_batch,
            )
        return self.last_state()

    def last_state(self) -> dict[str, Any]:
        """The state after the last complete step, whether or not a step is under way."""
        return save_state(self.pipeline, self.steps, self.consumed, self._entries)

    @property
    def given(self) -> int:
        """Microbatches of the step under way that are handed out."""
        return self._given if self._step is not None else 0

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
