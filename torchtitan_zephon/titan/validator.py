"""TorchTitan's Validator over several named sets, each with a loss of its own."""

from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn
from torchtitan.components.validate import Validator
from torchtitan.tools.logging import logger

from torchtitan_zephon.titan.loader import ZephonDataLoader


class _LossCatcher:
    """Stands in for the metrics processor during one set's pass, and keeps the loss it is given."""

    def __init__(self, processor: Any):
        self._processor = processor
        self.loss = float("nan")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_processor", "loss"):
            object.__setattr__(self, name, value)
        else:  # the validator adds its tokens to the real one's count
            setattr(self._processor, name, value)

    def log_validation(self, loss: float, step: int) -> None:
        """Keep the loss, to be logged with the set's name."""
        del step
        self.loss = loss


class ZephonValidator(Validator):
    """Runs one pass over each dataset of ``[zephon.validation]``.

    Each set's loss is logged under its name, and as TorchTitan's validation loss their mean: of one
    set, just its loss. A pass has the same rows at any rank count, so the same loss to rounding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate on every set."""
        whole, processor = self.dl_config, self.metrics_processor
        assert isinstance(whole, ZephonDataLoader.Config)
        assert whole.recipe is not None
        names = [d.name for d in whole.recipe.validation.datasets]
        losses = {}
        try:
            for name in names:
                catcher = _LossCatcher(processor)
                self.metrics_processor = catcher  # pyrefly: ignore[bad-assignment]
                self.dl_config = replace(whole, validation_set=name)
                super().validate(model_parts, step)
                losses[name] = catcher.loss
        finally:
            self.dl_config, self.metrics_processor = whole, processor
        if len(names) > 1:
            listed = "  ".join(f"{name}: {loss:.5f}" for name, loss in losses.items())
            logger.info("validate step: %2d  by set:  %s", step, listed)
        processor.log_validation(
            loss=sum(losses.values()) / len(losses),
            step=step,
            extra_metrics={f"validation_metrics/{n}/loss": loss for n, loss in losses.items()},
        )
