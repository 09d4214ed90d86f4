"""What is measured, in the process that does it: each task takes a job and returns its numbers."""

import json
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import peers
from bench.peers import SEQ_LEN
from bench.process import Job, cpu_seconds, memory_mb, thread_count

WARM_UP_S = 1.0


def throughput(job: Job, scratch: Path) -> dict[str, Any]:
    """Tokens per CPU-second and per second, after a CPU-second of warming up."""
    begin = time.perf_counter()
    peer = peers.build(job, scratch)
    first = next(peer.batches)
    first_batch = time.perf_counter() - begin
    fill = statistics.fmean(peer.fill(batch) for batch in [first, *peers.take(peer.batches, 20)])
    _take_for(peer, job, WARM_UP_S)
    cpu, wall = cpu_seconds(), time.perf_counter()
    tokens = _take_for(peer, job, job.seconds) * fill
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    return {
        "tokens": tokens,
        "cpu_s": cpu,
        "wall_s": wall,
        "tokens_per_cpu_s": tokens / cpu,
        "tokens_per_s": tokens / wall,
        "fill": fill,
        "first_batch_s": first_batch,
        "rss_mb": memory_mb(),
        "peak_rss_mb": memory_mb("VmHWM"),
        "threads": thread_count(),
        "detail": peer.detail,
    }


def _take_for(peer: peers.Peer, job: Job, seconds: float) -> int:
    """Places of the batches taken in so many CPU-seconds, or in ten times as many seconds."""
    rows = min(job.batch, 8) if job.peer == "ours" else job.batch
    batches, cpu, begin = 0, cpu_seconds(), time.perf_counter()
    look = begin + seconds / 8  # the CPU time of a family of processes takes milliseconds to find
    while True:
        next(peer.batches)
        batches += 1
        now = time.perf_counter()
        if now > look:
            look = now + seconds / 8
            if cpu_seconds() - cpu > seconds or now - begin > 10 * seconds:
                return batches * rows * SEQ_LEN


def first_batch(job: Job, scratch: Path) -> dict[str, Any]:
    """Seconds from construction to the first batch, and of those after construction."""
    begin = time.perf_counter()
    peer = peers.build(job, scratch)
    built = time.perf_counter()
    next(peer.batches)
    end = time.perf_counter()
    return {
        "first_batch_s": end - begin,
        "built_s": built - begin,
        "rss_mb": memory_mb(),
    }


def save(job: Job, scratch: Path) -> dict[str, Any]:
    """Run for a number of batches, then weigh the state and leave it in a file."""
    peer = peers.build(job, scratch)
    peers.take(peer.batches, job.options["batches"])
    begin = time.perf_counter()
    state = peer.state()
    seconds = time.perf_counter() - begin
    Path(job.options["state"]).write_bytes(pickle.dumps(state))
    return {"state_dict_s": seconds} | weigh(state)


def weigh(state: Any) -> dict[str, Any]:
    """Entries of a state and their bytes, as a checkpoint would store them."""
    entries = list(state.values()) if isinstance(state, dict) else [state]
    if isinstance(entries[-1], dict) and all(isinstance(v, str) for v in entries[-1].values()):
        entries += entries.pop().values()  # ours: an entry for each lane
    sizes = [len(v) if isinstance(v, str | bytes) else len(pickle.dumps(v)) for v in entries]
    return {
        "entries": len(sizes),
        "median_bytes": statistics.median(sizes),
        "largest_bytes": max(sizes),
        "total_bytes": sum(sizes),
    }


def resume(job: Job, scratch: Path) -> dict[str, Any]:
    """Seconds from a state's loading, and from construction, to the first batch after it."""
    state = pickle.loads(Path(job.options["state"]).read_bytes())
    begin = time.perf_counter()
    peer = peers.build(job, scratch)
    built = time.perf_counter()
    peer.resume(state)
    next(peer.batches)
    end = time.perf_counter()
    return {"load_to_batch_s": end - built, "build_to_batch_s": end - begin}


def state_every_step(job: Job, scratch: Path) -> dict[str, Any]:
    """Milliseconds of a state_dict() that is called after each of many steps, and its size."""
    peer = peers.build(job, scratch)
    batches_a_step = max(1, job.batch // 8) if job.peer == "ours" else 1
    calls, state = [], None
    for _ in range(job.options["steps"]):
        peers.take(peer.batches, batches_a_step)
        begin = time.perf_counter()
        state = peer.state()
        calls.append((time.perf_counter() - begin) * 1000)
    return {
        "state_dict_ms": statistics.median(calls),
        "slowest_ms": max(calls),
    } | weigh(state)


def limit(job: Job, scratch: Path) -> dict[str, Any]:
    """The stages that the loader cannot do without, alone: reading, parsing, tokenizing, copying.

    Tokens per CPU-second in one thread, each for the same documents and for about job.seconds.
    """
    import msgspec

    from torchtitan_zephon.ops.tokenize import load_tokenizer
    from torchtitan_zephon.recipe import TokenizerConfig

    data = b"".join(p.read_bytes() for p in sorted(Path(job.corpus).rglob("*.jsonl")))
    data = data[: data.rfind(b"\n", 0, 16_000_000) + 1]
    lines = data.splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    config = TokenizerConfig(path=job.tokenizer)
    fast = load_tokenizer(config, "gigatoken").encode_plain
    slow = load_tokenizer(config, "tokenizers").encode_plain
    blocks = [texts[i : i + 100] for i in range(0, len(texts), 100)]
    tokens = sum(len(fast(block)[0]) for block in blocks)
    record = msgspec.defstruct("Record", [("text", str)])
    decode = msgspec.json.Decoder(record).decode
    few = blocks[: max(1, len(blocks) // 20)]
    few_tokens = sum(len(fast(block)[0]) for block in few)
    # A batch is three int64 arrays: writing them once is the least that any input needs.
    batch = np.zeros((3, 8, SEQ_LEN), dtype=np.int64)
    rates = {
        "tokenizer alone (gigatoken)": _rate(lambda: [fast(b) for b in blocks], tokens, job),
        "one call for all texts (gigatoken)": _rate(lambda: fast(texts), tokens, job),
        "tokenizer alone (tokenizers)": _rate(lambda: [slow(b) for b in few], few_tokens, job),
        "JSON parsing alone (msgspec)": _rate(lambda: [decode(x) for x in lines], tokens, job),
        "copying the batches alone": _rate(batch.copy, 8 * SEQ_LEN, job),
    }
    return {"rates": rates}


def _rate(work: Callable[[], Any], tokens: int, job: Job) -> float:
    work()
    done, cpu = 0, time.process_time()
    while time.process_time() - cpu < job.seconds / 4:
        work()
        done += tokens
    return done / (time.process_time() - cpu)


def memory(job: Job, scratch: Path) -> dict[str, Any]:
    """Resident size along a stream of ever-new words, now and at its peak, twenty times."""
    from bench import virtual

    virtual.register()
    wanted = job.options["tokens"]
    baseline = memory_mb()
    peer = peers.build(job, scratch)
    samples, tokens, cpu = [], 0, cpu_seconds()
    for number in range(1, 21):
        while tokens < wanted * number / 20:
            next(peer.batches)
            tokens += min(job.batch, 8) * SEQ_LEN
        now, peak = memory_mb(), memory_mb("VmHWM")
        samples.append({"tokens": tokens, "rss_mb": now, "peak_rss_mb": peak})
    return {
        "imports_mb": baseline,
        "samples": samples,
        "tokens_per_cpu_s": tokens / (cpu_seconds() - cpu),
    }


def virtual_first_batch(job: Job, scratch: Path) -> dict[str, Any]:
    """The first batch of a corpus that the benchmark's own file system makes up as it is read."""
    from bench import virtual

    virtual.register()
    return first_batch(job, scratch)


def footprint(job: Job, scratch: Path) -> dict[str, Any]:
    """Resident memory beyond what importing torch and loading the tokenizer take."""
    from torchtitan_zephon.ops.tokenize import load_tokenizer
    from torchtitan_zephon.recipe import TokenizerConfig

    tokenizer = load_tokenizer(TokenizerConfig(path=job.tokenizer))
    before = memory_mb()
    result = throughput(job, scratch)
    del tokenizer
    return result | {"beyond_mb": result["peak_rss_mb"] - before}


def loop(job: Job, scratch: Path) -> dict[str, Any]:
    """See `bench.loop`: the training loop with this loader, or with the same batches held."""
    from bench.loop import measure

    return measure(job, scratch)


TASKS: dict[str, Callable[[Job, Path], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        throughput,
        first_batch,
        save,
        resume,
        state_every_step,
        limit,
        memory,
        virtual_first_batch,
        footprint,
        loop,
    )
}
