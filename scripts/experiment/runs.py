"""Starting an experiment's runs, and reading what they recorded."""

import argparse
import csv
import hashlib
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LOADERS = {"stock": "TorchTitan's stock loader", "zephon": "this loader"}
LAUNCHER = "torchrun --standalone --nproc-per-node {ranks}"

CONFIG = """\
hf_assets_path = "{data}/tokenizer"

[model]
module = "llama3"
config = "llama3_debugmodel"
layers = {layers}
vocab_size = {vocab_size}

[training]
global_batch_size = {batch}
local_batch_size = {local_batch}  # the same for any number of ranks: fewer ranks accumulate more
seq_len = {seq_len}
steps = {steps}

[parallelism]
# Not sharded: on a CPU the initial weights would depend on the sharding.
data_parallel_shard_degree = 1

[lr_scheduler]  # constant after the warm-up
warmup_steps = 5
total_steps = 100000
decay_ratio = 0.0

[optimizer]
lr = {lr}

[metrics]
log_freq = 1
disable_color_printing = true

[debug]
seed = {seed}

[validator]
enable = {validate}
freq = {steps}
steps = -1

[zephon]
seed = {seed}

[[zephon.datasets]]
name = "train"
path = "{data}/train/{seed}/documents.jsonl"

[zephon.shuffle]
buffer_size = {buffer}

[[zephon.validation.datasets]]
name = "held_out"
path = "{data}/held_out.jsonl"
"""


@dataclass(frozen=True)
class Arm:
    """One run of an experiment."""

    name: str
    """Its folder below the experiment's, `stock/resumed-on-2`."""
    loader: str
    """A key of LOADERS."""
    ranks: int
    config: str
    """Path of the TOML."""
    first: int
    """The step after the checkpoint that it starts from; 1 without one."""
    flags: tuple[str, ...] = ()
    """Settings that win over the TOML."""
    copy: tuple[tuple[str, str], ...] = field(default=())
    """Folders (from, to) to be copied before the start: the checkpoint to resume from."""

    def command(self, out: str, launcher: str = LAUNCHER) -> list[str]:
        """What is run, from the root of the repository."""
        folder = f"{out}/{self.name}"
        return [
            *shlex.split(launcher.format(ranks=self.ranks)),
            "scripts/experiment/train.py",
            *("--loader", self.loader, "--record", f"{folder}/record"),
            *("--config_file", self.config, "--dump_folder", folder),
            *("--parallelism.data_parallel_replicate_degree", str(self.ranks)),
            *self.flags,
        ]


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The options that both experiments have."""
    parser.add_argument("--out", default=out, help="folder, relative to the repository's root")
    parser.add_argument("--global-batch", type=int, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--jobs", type=int, help="runs at a time; default: 1 with GPUs, else 2")
    parser.add_argument("--launcher", default=LAUNCHER, help="starts a command on {ranks} ranks")
    parser.add_argument("--report-only", action="store_true", help="from the CSV of earlier runs")
    parser.add_argument("flags", nargs="*", help="after --: settings of all runs, over the TOML's")


def global_batch(rank_counts: Iterable[int], at_least: int) -> int:
    """The smallest multiple of all rank counts that is not below `at_least`."""
    unit = math.lcm(*rank_counts)
    return unit * math.ceil(at_least / unit)


def write_config(path: Path, **values: Any) -> None:
    """Write CONFIG with its blanks filled in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CONFIG.format(**values), encoding="utf-8")


def run_all(arms: Sequence[Arm], out: str, jobs: int | None, launcher: str) -> dict[str, float]:
    """Run the arms, `jobs` at a time, in order; returns the seconds that each took.

    Two at a time on a CPU, where a run on one rank keeps one core busy; GPUs are not shared.

    Raises:
        RuntimeError: a run failed; the message has the end of its log.
    """
    with ThreadPoolExecutor(jobs or (1 if torch.accelerator.is_available() else 2)) as pool:
        pending = [pool.submit(_run, arm, out, launcher) for arm in arms]
        try:
            return {arm.name: f.result() for arm, f in zip(arms, pending, strict=True)}
        finally:
            pool.shutdown(cancel_futures=True)


def _run(arm: Arm, out: str, launcher: str) -> float:
    folder = ROOT / out / arm.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source, target in arm.copy:
        shutil.copytree(ROOT / source, ROOT / target)
    command = arm.command(out, launcher)
    if command[0] == "torchrun":  # of this Python, wherever the shell would find one
        command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    cache = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    paths = f"{ROOT}:{ROOT / 'scripts'}"
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    begin = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | threads | cache | {"PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = time.monotonic() - begin
    if done.returncode:
        tail = (folder / "log.txt").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"{shlex.join(command)}\nended with status {done.returncode}:\n{tail}")
    print(f"{arm.name}: {seconds:.0f} s", flush=True)
    return seconds


def read_losses(record: Path, kind: str) -> dict[int, float]:
    """The loss of each step; `kind` is train or validate."""
    with (record / "losses.csv").open() as file:
        return {int(step): float(loss) for k, step, loss in csv.reader(file) if k == kind}


def read_batches(record: Path, *, batch: int, ranks: int, first: int) -> dict[int, list[str]]:
    """The rows' digests of each global batch, in the order of the ranks.

    Raises:
        ValueError: the ranks recorded different numbers of steps.
    """
    share = batch // ranks
    rows = [(record / f"rows-{rank}.txt").read_text().split() for rank in range(ranks)]
    if len({len(r) // share for r in rows}) != 1:
        raise ValueError(f"{record}: the ranks recorded {[len(r) for r in rows]} rows")
    return {
        first + i: [digest for r in rows for digest in r[i * share : (i + 1) * share]]
        for i in range(len(rows[0]) // share)
    }


def batch_digest(rows: Iterable[str]) -> str:
    """SHA-256 of a global batch: of the digests of its rows."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, rows))).hexdigest()


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with the same keys under a header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV with a header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
