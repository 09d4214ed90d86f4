"""A data loader with the same global batches on any number of data-parallel ranks."""

from torchtitan_zephon.api import Pipeline
from torchtitan_zephon.batch import Batch
from torchtitan_zephon.recipe import PhaseConfig
from torchtitan_zephon.work_sources import (
    CustomWorkSource,
    Dataset,
    MixtureSpec,
    SequentialWorkSource,
    StaticMixtureWorkSource,
    TokenEstimation,
)

__all__ = [
    "Batch",
    "CustomWorkSource",
    "Dataset",
    "MixtureSpec",
    "PhaseConfig",
    "Pipeline",
    "SequentialWorkSource",
    "StaticMixtureWorkSource",
    "TokenEstimation",
]
