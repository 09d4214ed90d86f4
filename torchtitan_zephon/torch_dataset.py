"""A pipeline inside ``torch.utils.data.DataLoader`` or torchdata's ``StatefulDataLoader``.

A pipeline needs no such wrapping, and its own thread does the work. Where a framework insists on
one, each worker process makes the rank's whole stream and yields every so many-th microbatch of it,
so the loader, which takes from its workers in turns, gets the stream in its order.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_zephon.stream import BatchStream

if TYPE_CHECKING:
    from torchtitan_zephon.api import Pipeline

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class PipelineDataset(IterableDataset[Sample]):
    """Yields microbatches as ``Batch.to_training`` gives them; use it with ``batch_size=None``.

    The state counts what this dataset has yielded, to the microbatch, also inside a step. A resume
    wants the same number of workers, as StatefulDataLoader does.
    """

    def __init__(self, pipeline: "Pipeline"):
        self._pipeline = pipeline
        self._saved: dict[str, Any] | None = None
        self._stream: BatchStream | None = None
        self._count = 0

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._stream is None:
            self._stream, self._count = self._pipeline.new_stream(), 0
            if self._saved is not None:
                self._stream.load_state_dict(self._saved["stream"])
                for _ in range(self._saved["given"]):
                    next(self._stream)
                self._count = self._saved["count"]
                self._saved = None
        for batch in self._pipeline.batches(self._stream):
            self._count += 1
            if (self._count - 1) % workers == number:
                yield batch.to_training()

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last microbatch that was yielded."""
        if self._stream is None:
            stream = self._pipeline.new_stream()
            return self._saved or {"stream": stream.last_state(), "given": 0, "count": 0}
        return {
            "stream": self._stream.last_state(),
            "given": self._stream.given,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; takes effect when iterating begins."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._saved = state
