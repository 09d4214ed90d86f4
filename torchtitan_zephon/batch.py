"""A microbatch, and what can be told of its documents."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Batch:
    """One microbatch: int64 arrays [microbatch_size, max_length]."""

    inputs: np.ndarray
    """Token ids."""
    labels: np.ndarray
    """The next token in the document, -100 where there is none to learn."""
    positions: np.ndarray
    """Position in the document, restarting with each row."""
    extra_fields: tuple[str, ...] = ()

    def to_training(self) -> tuple[dict[str, Any], Any]:
        """As TorchTitan's trainer takes it: ``({"input", "positions", ...}, labels)``, tensors."""
        import torch

        fields = {"input": self.inputs, "positions": self.positions}
        fields |= {name: getattr(self, name) for name in self.extra_fields}
        return {k: torch.from_numpy(v) for k, v in fields.items()}, torch.from_numpy(self.labels)

    @property
    def document_ids(self) -> np.ndarray:
        """Which document of its row each token belongs to, from 0; int64 as the inputs."""
        return document_ids(self.positions)

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Where documents begin in the rows laid end to end, and the end: int32 [documents + 1]."""
        return cu_seqlens(self.positions)


def document_ids(positions: np.ndarray) -> np.ndarray:
    """Numbers of the documents in each row, from their positions, [rows, seq_len]."""
    return np.cumsum(positions == 0, axis=1) - 1


def cu_seqlens(positions: np.ndarray) -> np.ndarray:
    """Cumulative lengths of the documents in rows laid end to end, int32 [documents + 1]."""
    return np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
