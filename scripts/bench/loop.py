"""The training loop: TorchTitan's trainer on the CPU with this loader, or with batches held."""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.process import Job

SEQ_LEN, LOCAL_BATCH, GLOBAL_BATCH = 256, 1, 12
CONFIG = """
dump_folder = "{folder}"
hf_assets_path = "{tokenizer}"
[model]
module = "llama3"
config = "llama3_debugmodel"
layers = 2
vocab_size = 4098
[training]
local_batch_size = {local}
global_batch_size = {batch}
seq_len = {seq_len}
steps = {steps}
[metrics]
log_freq = 1000
[[zephon.datasets]]
name = "corpus"
path = "{corpus}"
"""


class Timed:
    """A loader that notes how long each ``next`` took."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self.waits: list[float] = []

    def __iter__(self) -> "Timed":
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        batch = next(self._batches)
        self.waits.append(time.perf_counter() - begin)
        return batch


def measure(job: Job, scratch: Path) -> dict[str, Any]:
    """Train the debug model for some steps; seconds a step, and of them in the loader's ``next``.

    With ``options["held"]`` the batches, the same ones, are all made before the first step.
    """
    import torch

    from torchtitan_zephon.titan.config import load_config
    from torchtitan_zephon.titan.cpu import use_cpu_if_no_accelerator

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(job.options["port"])}
    use_cpu_if_no_accelerator()
    steps = job.options["steps"]
    toml = scratch / "train.toml"
    toml.write_text(
        CONFIG.format(
            folder=scratch,
            tokenizer=job.tokenizer,
            corpus=job.corpus,
            local=LOCAL_BATCH,
            batch=GLOBAL_BATCH,
            seq_len=SEQ_LEN,
            steps=steps,
        )
    )
    trainer: Any = load_config(["--config_file", str(toml)]).build()
    loader, microbatches = trainer.dataloader, GLOBAL_BATCH // LOCAL_BATCH
    batches = iter(loader)
    if job.options["held"]:
        held = [next(batches) for _ in range(steps * microbatches)]
        loader.close()
        batches = iter(held)
    timed = Timed(batches)
    trainer.dataloader = timed
    seconds = []
    train_step = trainer.train_step

    def timed_step(data: Any) -> None:
        begin = time.perf_counter()
        train_step(data)
        seconds.append(time.perf_counter() - begin)

    trainer.train_step = timed_step
    cpu = time.process_time()
    trainer.train()
    cpu = time.process_time() - cpu
    loader.close()
    torch.distributed.destroy_process_group()
    waits = [
        sum(timed.waits[i : i + microbatches]) for i in range(0, len(timed.waits), microbatches)
    ]
    return {
        "step_ms": statistics.median(seconds[2:]) * 1000,
        "wait_ms": statistics.median(waits[2:]) * 1000,
        "longest_wait_ms": max(waits[1:]) * 1000,
        "first_wait_ms": waits[0] * 1000,
        "waited_share": sum(waits[1:]) / sum(seconds[1:]),
        "cpu_s_a_step": cpu / steps,
    }
