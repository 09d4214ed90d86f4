"""What a pipeline in Python reads, and in which shares: the first part of a recipe."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_zephon.ops.mix import WorkSource
from torchtitan_zephon.recipe import DatasetConfig, PhaseConfig, RecipeError


class Dataset:
    """A dataset by its name and place."""

    @staticmethod
    def from_path(name: str, path: str | Path, **settings: Any) -> DatasetConfig:
        """A file, folder, glob or fsspec URL of JSONL or Parquet.

        Args:
            name: in logs, counters and keys of the order.
            path: where it is.
            settings: as in a ``[[zephon.datasets]]`` table: format, text_field, tokens_field,
                passes, group.
        """
        return DatasetConfig(name=name, path=str(path), **settings)


class MixtureSpec(dict[str, float]):
    """Weights by dataset name; a plain dict does as well."""


@dataclass(frozen=True)
class TokenEstimation:
    """Accepted where other loaders estimate tokens: here shares are exact, there is no estimate."""


@dataclass(frozen=True)
class StaticMixtureWorkSource:
    """Datasets whose shares of the tokens follow ``mixture``, or ``phases`` of it."""

    datasets: Sequence[DatasetConfig]
    mixture: Mapping[str, float]
    """Weight of each dataset by name."""
    token_estimation: TokenEstimation | None = None
    seed: int = 0
    phases: Sequence[PhaseConfig] = ()
    """Other weights from a number of tokens on."""

    def __post_init__(self) -> None:
        names = [d.name for d in self.datasets]
        faults = [f"mixture: no weight for dataset {n!r}" for n in names if n not in self.mixture]
        faults += [f"mixture: no dataset is named {n!r}" for n in self.mixture if n not in names]
        if faults:
            raise RecipeError(faults)

    def settings(self) -> dict[str, Any]:
        """The recipe fields that it decides."""
        datasets = [
            dataclasses.replace(d, weight=float(self.mixture[d.name])) for d in self.datasets
        ]
        return {
            "datasets": tuple(datasets),
            "seed": self.seed,
            "phases": tuple(self.phases),
            "work_source": "weights",
        }


@dataclass(frozen=True)
class SequentialWorkSource:
    """All of a dataset, then all of the next."""

    datasets: Sequence[DatasetConfig]
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """The recipe fields that it decides."""
        return {
            "datasets": tuple(self.datasets),
            "seed": self.seed,
            "work_source": "sequential",
        }


@dataclass(frozen=True)
class CustomWorkSource:
    """Datasets drawn from as ``source.choose`` says; see ``ops.mix.WorkSource``."""

    datasets: Sequence[DatasetConfig]
    source: WorkSource
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """The recipe fields that it decides."""
        kind = type(self.source)
        return {
            "datasets": tuple(self.datasets),
            "seed": self.seed,
            "work_source": f"{kind.__module__}:{kind.__qualname__}",
        }


Source = StaticMixtureWorkSource | SequentialWorkSource | CustomWorkSource
