"""TorchTitan's own ``train.py`` on the CPU, and a registry with a model small enough for it."""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from torchtitan_zephon.titan.config import ModelConfig, resize_model
from torchtitan_zephon.titan.cpu import adapt_config_for_cpu, use_cpu_if_no_accelerator


def tiny() -> Trainer.Config:
    """The debug model with one layer."""
    config = llama3_debugmodel()
    resize_model(config, ModelConfig(module="llama3", config="debug", layers=1), faults=[])
    adapt_config_for_cpu(config)
    return config


if __name__ == "__main__":
    use_cpu_if_no_accelerator()
    from torchtitan.train import main

    main()
