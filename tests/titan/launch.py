"""Starting real runs: torchrun on this machine, through gloo."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.toys import byte_tokenizer, write_jsonl, write_parquet

ROOT = Path(__file__).parents[2]

CONFIG = """
dump_folder = "{folder}/out"
hf_assets_path = "{folder}/tokenizer"
[model]
module = "llama3"
config = "llama3_debugmodel"
layers = 2
[training]
local_batch_size = 1
global_batch_size = 12
seq_len = 32
steps = 6
[lr_scheduler]
warmup_steps = 0
total_steps = 100000
decay_ratio = 0.0
[checkpoint]
enable = true
interval = 3
last_save_model_only = false
[metrics]
disable_color_printing = true
[debug]
seed = 1
[validator]
enable = {validate}
freq = 3
steps = -1
[zephon]
seed = 5
[[zephon.datasets]]
name = "a"
path = "{folder}/a.jsonl"
weight = 0.7
[[zephon.datasets]]
name = "b"
path = "{folder}/b.parquet"
weight = 0.3
[zephon.packing]
algorithm = "first_fit"
[zephon.shuffle]
buffer_size = 24
[[zephon.validation.datasets]]
name = "v"
path = "{folder}/v.jsonl"
[[zephon.validation.datasets]]
name = "w"
path = "{folder}/w.jsonl"
"""


def write_config(folder: Path, validate: str = "false") -> Path:
    """A training config with its data and tokenizer, all in ``folder``."""
    byte_tokenizer(folder / "tokenizer")
    write_jsonl(folder / "a.jsonl", [f"line {n} " * (n % 11) for n in range(200)])
    write_parquet(folder / "b.parquet", [f"row {n}, " * (n % 7) for n in range(300)], 50)
    write_jsonl(folder / "v.jsonl", [f"held out {n} " * (n % 5) for n in range(23)])
    write_jsonl(folder / "w.jsonl", [f"other {n} " * (n % 4) for n in range(31)])
    path = folder / "train.toml"
    path.write_text(CONFIG.format(folder=folder, validate=validate), "utf-8")
    return path


def start(ranks: int, *command: str) -> subprocess.Popen[str]:
    """torchrun with ``command`` on so many ranks, in a process group of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*launcher, f"--nproc-per-node={ranks}", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(ranks: int, *command: str, timeout: float = 240) -> tuple[int, str]:
    """The exit status and the output of a run; one that hangs is killed and fails the test."""
    process = start(ranks, *command)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output[-4000:]}") from None
    return process.returncode, output


def train(ranks: int, config: Path, *flags: str, timeout: float = 240) -> str:
    """The output of a training run that succeeds."""
    status, output = run(
        ranks,
        "-m",
        "torchtitan_zephon.train",
        "--config_file",
        str(config),
        *flags,
        timeout=timeout,
    )
    assert status == 0, output[-6000:]
    return output


def digests(folder: Path) -> list[tuple[int, str]]:
    """Step and SHA-256 of each line of a run's audit log."""
    lines = (folder / "audit" / "global_batches.jsonl").read_text().splitlines()
    return [(record["step"], record["sha256"]) for record in map(json.loads, lines)]
