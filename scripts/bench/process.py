"""Measuring in whole processes: starting one a measurement, and what a process has used."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement, made in a process of its own."""

    task: str
    """Name of the measuring function."""
    peer: str
    """Whose loader it is."""
    corpus: str
    """Folder, or fsspec URL, of the data."""
    tokenizer: str
    """Folder of the tokenizer."""
    seconds: float = 4.0
    """CPU-seconds that a throughput is measured for."""
    fmt: str = "jsonl"
    packing: str = "wrap"
    batch: int = 8
    """Sequences of a global batch."""
    datasets: int = 1
    """The corpus is taken so many times, under as many names."""
    lanes: int | None = None
    buffer_size: int = 1000
    threads: int = 1
    audit: bool = False
    backend: str = "auto"
    """Of this project's loader: the tokenizer library. Of Grain: the one its map function calls."""
    options: dict[str, Any] = field(default_factory=dict)
    """What only one task or peer knows."""


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",  # as torchrun sets it
    "TOKENIZERS_PARALLELISM": "false",  # threads are what the loader itself starts
    "RAYON_NUM_THREADS": "1",
}


def run(job: Job, timeout: float = 600) -> dict[str, Any]:
    """Make one measurement in a fresh process and return its numbers.

    The process leads a group of its own, which is ended with it: some loaders leave children.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), "--worker"]
        log = Path(scratch, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, json.dumps(asdict(job)), "--scratch", scratch],
                env=os.environ | ENVIRONMENT | _cache(job, scratch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                return {"peer": job.peer, "error": f"no result in {timeout:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _result(job, Path(scratch), log.read_text(errors="replace"))


def run_forked(job: Job, task: Callable[[Job, Path], dict[str, Any]]) -> dict[str, Any]:
    """Make one measurement in a fork of this process, which has imported everything.

    For the smoke test alone: imports would be most of its time. The numbers mean nothing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                os.environ |= _cache(job, scratch)
                finish(task(job, Path(scratch)), Path(scratch))
            finally:
                traceback.print_exc()
                os._exit(1)
        os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return _result(job, Path(scratch), "")


def _cache(job: Job, scratch: str) -> dict[str, str]:
    return {"HF_DATASETS_CACHE": str(Path(job.options.get("hf_cache", scratch)).absolute())}


def _result(job: Job, scratch: Path, log: str) -> dict[str, Any]:
    result = scratch / "result.json"
    if not result.exists():
        print(log[-3000:], file=sys.stderr)
        return {"peer": job.peer, "error": "failed"}
    return {"peer": job.peer, **json.loads(result.read_text())}


def end_with_parent() -> None:
    """End this process's group when the benchmark that started it is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def finish(result: dict[str, Any], scratch: Path) -> None:
    """Hand a measurement to the parent and end this process, with whatever a loader left behind."""
    partial = scratch / "result.partial"
    partial.write_text(json.dumps(result))
    partial.rename(scratch / "result.json")
    sys.stdout.flush()
    os._exit(0)


def _descendants() -> dict[int, list[str]]:
    """For every living descendant of this process, the fields of its /proc stat behind the name."""
    fields, family = {}, {os.getpid()}
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                stat = (entry / "stat").read_text()
                fields[int(entry.name)] = stat.rpartition(")")[2].split()
    while found := {p for p, f in fields.items() if int(f[1]) in family and p not in family}:
        family |= found
    return {pid: fields[pid] for pid in family - {os.getpid()}}


def cpu_seconds() -> float:
    """Return user and system time of this process, its threads and all its descendants.

    Living children count too, where the system has /proc: a loader may work in processes.
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = sum(sum(map(int, fields[11:15])) for fields in _descendants().values())
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own + ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(key: str = "VmRSS") -> float:
    """Return the resident memory of this process and its descendants: VmRSS now, VmHWM at peak."""
    # Read from /proc: ru_maxrss would start at what the parent held when it started this process.
    total = 0
    for pid in [os.getpid(), *_descendants()]:
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split(f"{key}:")[1].split()[0])
    return total / 1024


def thread_count() -> int:
    """Return how many threads this process has."""
    return int(Path("/proc/self/status").read_text().split("Threads:")[1].split()[0])
