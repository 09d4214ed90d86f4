"""One run of an experiment: `torchtitan_zephon.train` with either loader, and a record of it.

    torchrun ... scripts/experiment/train.py --loader stock --record FOLDER --config_file FILE ...

The TOML has a `[zephon]` section either way: of the stock loader's runs it decides what they are
validated on. The stock loader reads the folder of the recipe's only dataset. Every rank records the
SHA-256 of each row that its loader hands to the trainer, rank 0 the losses with all their digits.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from torchtitan_zephon.titan.config import load_config
from torchtitan_zephon.titan.cpu import use_cpu_if_no_accelerator
from torchtitan_zephon.titan.loader import ZephonDataLoader
from torchtitan_zephon.train import train


def row_digest(tokens: Any, labels: Any, positions: Any) -> str:
    """SHA-256 of one row, as this project's audit defines it: three arrays of little-endian int32.

    Written out again instead of imported, so that the experiment does not take the loader's word.
    """
    arrays = (np.asarray(a).astype("<i4").tobytes() for a in (tokens, labels, positions))
    return hashlib.sha256(b"".join(arrays)).hexdigest()


class RecordingLoader(BaseDataLoader):
    """Hands on another loader's batches, and writes the digest of each row to a file."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        inner: BaseDataLoader.Config | None = None
        """The loader that is recorded."""
        folder: str = ""
        """Where `rows-RANK.txt` is written, one hex digest a line, in the order of training."""

    def __init__(self, config: Config, *, dp_rank: int, **kwargs: Any) -> None:
        assert config.inner is not None
        self._inner = config.inner.build(dp_rank=dp_rank, **kwargs)
        self._path = Path(config.folder) / f"rows-{dp_rank}.txt"

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        with self._path.open("w") as file:
            for inputs, labels in self._inner:
                rows = zip(inputs["input"], labels, inputs["positions"], strict=True)
                file.writelines(f"{row_digest(*row)}\n" for row in rows)
                file.flush()
                yield inputs, labels

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def close(self) -> None:
        """Close the recorded loader, if it can be."""
        if hasattr(self._inner, "close"):
            self._inner.close()


class RecordingMetrics(MetricsProcessor):
    """TorchTitan's metrics, and the losses in a file: TorchTitan logs them with 5 digits."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        folder: str = ""
        """Where rank 0 writes `losses.csv`: kind (train or validate), step, loss."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._path = Path(config.folder) / "losses.csv" if dist.get_rank() == 0 else None

    def _record(self, kind: str, step: int, loss: float) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{kind},{step},{loss!r}\n")

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        """Log and record a training step."""
        self._record("train", step, float(global_avg_loss))
        super().log(step, global_avg_loss, *args, **kwargs)

    def log_validation(self, loss: float, step: int, *args: Any, **kwargs: Any) -> None:
        """Log and record a validation pass."""
        self._record("validate", step, float(loss))
        super().log_validation(loss, step, *args, **kwargs)


def record(config: Trainer.Config, loader: str, folder: Path) -> None:
    """Change `config`, in place, to use `loader` and to record into `folder`."""
    zephon = config.dataloader
    assert isinstance(zephon, ZephonDataLoader.Config)
    assert zephon.recipe is not None
    inner: BaseDataLoader.Config = zephon
    if loader == "stock":
        (dataset,) = zephon.recipe.datasets
        # "c4_test" is the stock entry that reads a local folder of JSONL.
        inner = HuggingFaceTextDataLoader.Config(
            dataset="c4_test", dataset_path=str(Path(dataset.path).parent)
        )
    config.dataloader = RecordingLoader.Config(inner=inner, folder=str(folder))
    config.metrics = derive(config.metrics, RecordingMetrics.Config, folder=str(folder))


def main() -> int:
    """Train; returns the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--loader", choices=("stock", "zephon"), required=True)
    parser.add_argument("--record", type=Path, required=True)
    args, flags = parser.parse_known_args()
    init_logger()
    use_cpu_if_no_accelerator()
    config = load_config(flags)
    args.record.mkdir(parents=True, exist_ok=True)
    record(config, args.loader, args.record)
    return train(config)


if __name__ == "__main__":
    sys.exit(main())
