"""Bringing the ranks' shares of each step to the rank that writes the log, beside training.

The ranks hand their shares to the job's key-value store, and a thread of the writing rank takes
them out. No rank waits for another, so a rank that dies holds nobody up.
"""

import logging
import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchtitan_zephon.audit.log import AuditLog, Share

logger = logging.getLogger(__name__)

_TOGETHER = 0.05  # seconds for which steps that follow each other closely are logged together
_LOOK_UP = timedelta(seconds=1)  # between two looks whether the run has ended
_LAST_WAIT = 5  # looks that the last steps' shares are given after the run's end


@dataclass(frozen=True)
class _Pending:
    step: int
    sequences: int
    share: Share


class Publisher:
    """Hands this rank's shares to the store."""

    def __init__(self, store: Any, rank: int):
        self._store, self._rank = store, rank
        # Processes of one data-parallel rank (tensor- or pipeline-parallel peers) have the same
        # share; the first to come hands it in.
        self._first = store.add(f"publisher/{rank}", 1) == 1

    def submit(self, step: int, sequences: int, share: Share) -> None:
        """Hand in the share of a step."""
        del sequences
        if self._first:
            self._store.set(f"{step}/{self._rank}", share.to_bytes())

    def close(self) -> None:
        """Nothing is held."""


class Writer:
    """Writes the log from its own shares and those that ``ranks - 1`` others publish.

    A step whose data differs from what the log has makes the next ``submit``, or ``close``, raise.
    """

    def __init__(self, log: AuditLog, store: Any, ranks: int):
        self._log, self._store, self._ranks = log, store, ranks
        self._queue: queue.SimpleQueue[list[_Pending] | None] = queue.SimpleQueue()
        self._held: list[_Pending] = []
        self._handed_over = 0.0
        self._error: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zephon-audit", daemon=True)
        self._thread.start()

    def submit(self, step: int, sequences: int, share: Share) -> None:
        """Log a step as soon as the other ranks' shares are there."""
        self._raise()
        self._held.append(_Pending(step, sequences, share))
        # Waking the thread for each of thousands of steps a second would cost more than they do.
        if time.monotonic() - self._handed_over > _TOGETHER:
            self._hand_over()

    def _hand_over(self) -> None:
        self._queue.put(self._held)
        self._held, self._handed_over = [], time.monotonic()

    def close(self) -> None:
        """Finish the log.

        Raises:
            AuditError: as ``submit``, for the last steps.
        """
        if not self._ending.is_set():
            self._ending.set()
            self._hand_over()
            self._queue.put(None)
            self._thread.join()
            self._log.close()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            while (together := self._queue.get()) is not None:
                for pending in together:
                    others = self._others(pending.step)
                    if others is None:
                        logger.warning(
                            "audit: step %d and later are not logged: not every rank told what it "
                            "was trained on before the run ended",
                            pending.step,
                        )
                        return
                    self._log.append(pending.step, pending.sequences, [pending.share, *others])
                self._log.flush()
        except BaseException as error:
            self._error = error

    def _others(self, step: int) -> list[Share] | None:
        keys = [f"{step}/{rank}" for rank in range(1, self._ranks)]
        if not keys:
            return []
        looks = 0
        while True:
            try:
                self._store.wait(keys, _LOOK_UP)
                break
            except RuntimeError:  # the time is over (DistStoreError), or the store is gone
                if self._ending.wait(0.1):  # a store that is gone answers at once: do not spin
                    looks += 1
                    if looks >= _LAST_WAIT:
                        return None
        values = self._store.multi_get(keys)
        for key in keys:
            self._store.delete_key(key)
        return [Share.from_bytes(v) for v in values]
