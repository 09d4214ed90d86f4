"""A data loader with the same global batches on any number of data-parallel ranks."""

from torchtitan_zephon.api import (
    Batch,
    CustomWorkSource,
    Dataset,
    MixtureSpec,
    Pipeline,
    SequentialWorkSource,
    StaticMixtureWorkSource,
    TokenEstimation,
)

__all__ = [
    "Batch",
    "CustomWorkSource",
    "Dataset",
    "MixtureSpec",
    "Pipeline",
    "SequentialWorkSource",
    "StaticMixtureWorkSource",
    "TokenEstimation",
]
