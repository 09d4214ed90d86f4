"""Measures this loader against TorchTitan's stock text loader on the same generated corpus.

Usage:
    python scripts/benchmark.py                 tokens per CPU-second, in pairs, one process each
    python scripts/benchmark.py --first-batch   seconds from construction to the first batch, 1 GB
    python scripts/benchmark.py --state         bytes in a checkpoint, and the time to take them

The corpus is made of seeded pseudo-words with Zipf frequencies in documents of lognormal length.
It and a 32k byte-level BPE tokenizer trained on it are made once and kept under --work. CPU time is
user and system time of all threads and children. Nothing is downloaded.
"""

import argparse
import importlib
import itertools
import json
import os
import pickle
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from prepare_demo_data import train_tokenizer

SEQ_LEN = 2048
LOCAL_BATCH_SIZE = 8
VOCAB_SIZE = 32_768
BLOCK_MB = 256  # larger corpora repeat one block: it is the bytes that count, not the words
STATE_LANES = 64
STATE_STEPS = 20
STATE_CALLS = 20
PACKAGES = ["torch", "torchtitan", "torchdata", "datasets", "tokenizers", "gigatoken"]


# --- corpus ---------------------------------------------------------------------------------------


def make_words(rng: np.random.Generator, count: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and byte counts of distinct pseudo-words, short words first.

    200,000 words with Zipf frequencies give about as many distinct words in 64 MB as English has.
    """
    onsets = [*"bcdfghjklmnprstvwyz", "th", "st", "pr", "ch", "sh", "tr", "pl", *[""] * 4]
    vowels = [*"aeiouaeioe", "ea", "ou", "ai", "ee"]
    codas = [*"nstrldm", "ng", "nt", "st", "ck", *[""] * 12]
    syllables = np.array(["".join(parts) for parts in itertools.product(onsets, vowels, codas)])
    # Frequent words are short in every language: the number of syllables grows with rank.
    rank = np.arange(4 * count)
    lengths = 1 + (rng.random(len(rank)) * np.clip(np.log10(rank + 1), 0.5, 3.8)).astype(int)
    picks = syllables[rng.integers(len(syllables), size=(len(rank), 4))]
    words = ("".join(row[:n]) for row, n in zip(picks.tolist(), lengths.tolist(), strict=True))
    unique = list(itertools.islice(dict.fromkeys(words), count))
    sizes = np.array([len(word) for word in unique])
    return np.frombuffer("".join(unique).encode(), dtype=np.uint8), sizes


def make_documents(megabytes: int, seed: int = 0) -> Iterator[str]:
    """Yield documents of ASCII prose until they hold the given number of megabytes."""
    rng = np.random.default_rng(seed)
    words, sizes = make_words(rng)
    separators = [b" ", b", ", b". ", b".\n\n"]
    # One table of pieces: the words, then the separators, so that one gather writes the text.
    table = np.concatenate([words, np.frombuffer(b"".join(separators), dtype=np.uint8)])
    piece_sizes = np.concatenate([sizes, [len(piece) for piece in separators]])
    piece_starts = np.cumsum(piece_sizes) - piece_sizes
    zipf = np.cumsum(1 / (np.arange(len(sizes)) + 2.7) ** 1.05)
    left = megabytes * 1_000_000
    while left > 0:
        count = 500_000
        ids = np.searchsorted(zipf, rng.random(count) * zipf[-1])
        ends = rng.choice(4, size=count, p=[0.87, 0.06, 0.06, 0.01])
        pieces = np.empty(2 * count, dtype=np.int64)
        pieces[0::2], pieces[1::2] = ids, len(sizes) + ends
        stops = np.cumsum(piece_sizes[pieces])
        starts = stops - piece_sizes[pieces]
        gather = np.repeat(piece_starts[pieces] - starts, piece_sizes[pieces])
        text = table[gather + np.arange(stops[-1])]
        text[starts[0::2][1:][ends[:-1] >= 2]] -= 32  # sentences start with a capital
        lengths = np.exp(rng.normal(np.log(400), 1.0, size=count // 300)).astype(int) + 20
        cuts = starts[0::2][np.cumsum(lengths)[np.cumsum(lengths) < count]]
        for document in np.split(text, cuts):
            yield document.tobytes().decode("ascii").strip()
            left -= len(document)
            if left <= 0:
                return


def prepare(work: Path, megabytes: int) -> tuple[Path, Path]:
    """Return the folders of the corpus (one JSONL file) and the tokenizer, made if missing."""
    corpus, tokenizer = work / f"corpus-{megabytes}mb", work / f"tokenizer-{VOCAB_SIZE}"
    if not corpus.exists():
        print(f"making a corpus of {megabytes} MB", file=sys.stderr)
        block = "".join(
            json.dumps({"text": text}) + "\n" for text in make_documents(min(megabytes, BLOCK_MB))
        )
        partial = work / "corpus.partial"  # renamed when whole, so that no half corpus is measured
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / "corpus.jsonl").open("w") as file:
            for _ in range(max(1, megabytes // BLOCK_MB)):
                file.write(block)
        partial.rename(corpus)
    if not (tokenizer / "tokenizer_config.json").exists():
        print(f"training a tokenizer of {VOCAB_SIZE} entries", file=sys.stderr)
        train_tokenizer(make_documents(16, seed=1), VOCAB_SIZE, tokenizer)
    return corpus, tokenizer


# --- workers: one fresh process a measurement -----------------------------------------------------


def build_stock(corpus: Path, tokenizer: Path, args: argparse.Namespace) -> Any:
    """Return TorchTitan's own loader, built as its trainer builds it."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    # "c4_test" is the stock entry that reads a local folder of JSONL.
    config = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(corpus))
    return config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(tokenizer)),
        seq_len=SEQ_LEN,
        local_batch_size=LOCAL_BATCH_SIZE,
        snapshot_every_n_steps=500,  # what the trainer passes for a checkpoint every 500 steps
    )


def build_zephon(corpus: Path, tokenizer: Path, args: argparse.Namespace) -> Any:
    """Return this project's loader on its default settings, its audit included."""
    from torchtitan_zephon.recipe import parse_recipe
    from torchtitan_zephon.titan.loader import ZephonDataLoader

    table: dict[str, Any] = {"datasets": [{"name": "corpus", "path": str(corpus), "weight": 1.0}]}
    if args.state:
        table["lanes"] = STATE_LANES
    config = ZephonDataLoader.Config(
        recipe=parse_recipe(table, seq_len=SEQ_LEN, tokenizer_path=str(tokenizer)),
        global_batch_size=STATE_LANES if args.state else LOCAL_BATCH_SIZE,
        dump_folder=str(args.scratch),
    )
    return config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=LOCAL_BATCH_SIZE,
    )


MODULES = {
    "zephon": "torchtitan_zephon.titan.loader",
    "stock": "torchtitan.hf_datasets.text_datasets",
}
BUILD = {"zephon": build_zephon, "stock": build_stock}


def cpu_seconds() -> float:
    """Return user and system time of this process, all its threads and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_rss_mb() -> float:
    """Return this process's peak resident memory.

    Read from /proc: ru_maxrss would start at what the parent held when it started this process.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Build one loader, take its first batch, then measure what the flags ask for."""
    corpus, tokenizer = prepare(args.work, args.corpus_mb)
    # Imports (torch above all) take seconds in both: they are not the loaders' time.
    importlib.import_module("torchtitan.trainer")
    importlib.import_module(MODULES[args.worker])

    begin = time.perf_counter()
    loader = BUILD[args.worker](corpus, tokenizer, args)
    batches = iter(loader)
    next(batches)
    result = {"first_batch_s": time.perf_counter() - begin}

    if args.state:
        for _ in range(STATE_STEPS * STATE_LANES // LOCAL_BATCH_SIZE - 1):
            next(batches)
        result |= measure_state(loader)
    elif not args.first_batch:
        result |= measure_throughput(batches, args.seconds)
    return result | {"peak_rss_mb": peak_rss_mb()}


def measure_throughput(batches: Iterator, seconds: float) -> dict[str, float]:
    """Take batches for a number of CPU-seconds and return the tokens they held."""
    tokens, cpu, wall = 0, cpu_seconds(), time.perf_counter()
    while cpu_seconds() - cpu < seconds:
        _, labels = next(batches)
        tokens += labels.numel()
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    return {
        "tokens": tokens,
        "cpu_s": cpu,
        "wall_s": wall,
        "tokens_per_cpu_s": tokens / cpu,
        "tokens_per_wall_s": tokens / wall,
    }


def measure_state(loader: Any) -> dict[str, float]:
    """Return the sizes of the state's entries in bytes and the milliseconds to take them."""
    state = loader.state_dict()
    begin = time.perf_counter()
    for _ in range(STATE_CALLS):
        loader.state_dict()
    milliseconds = (time.perf_counter() - begin) / STATE_CALLS * 1000
    entries = [*state.values()]
    entries += entries.pop().values() if isinstance(entries[-1], dict) else []  # ours: lanes last
    sizes = [
        len(value) if isinstance(value, (str, bytes)) else len(pickle.dumps(value))
        for value in entries
    ]
    return {
        "entries": len(sizes),
        "median_bytes": statistics.median(sizes),
        "largest_bytes": max(sizes),
        "total_bytes": sum(sizes),
        "state_dict_ms": milliseconds,
    }


# --- the comparison -------------------------------------------------------------------------------


def run_worker(name: str, hf_cache: Path, *flags: str) -> dict[str, Any]:
    """Measure one loader in a fresh process; later flags win over this process's own."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(hf_cache.absolute()),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, *sys.argv[1:], *flags]
        command += ["--worker", name, "--scratch", scratch]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the {name} worker failed:\n{done.stderr[-4000:]}")
    return {"loader": name} | json.loads(done.stdout.splitlines()[-1])


def print_table(results: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print one line a measurement; columns give the key and format spec of each title."""
    print("  ".join([f"{'loader':<18}", *(f"{title:>13}" for title in columns)]))
    for result in results:
        cells = []
        for column in columns.values():
            key, spec = column.split(":")
            cells.append(format(format(result[key], spec), ">13"))
        print("  ".join([f"{result['loader']:<18}", *cells]))


def compare_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Run both loaders in turns, so that a machine that slows down slows both."""
    hf_cache = args.work / "hf"
    run_worker("stock", hf_cache, "--first-batch")  # converts the corpus to Arrow, unmeasured
    results = [run_worker(name, hf_cache) for _ in range(args.pairs) for name in BUILD]
    print_table(
        results,
        {
            "tokens/CPU-s": "tokens_per_cpu_s:,.0f",
            "tokens/s": "tokens_per_wall_s:,.0f",
            "tokens": "tokens:,.0f",
            "first batch s": "first_batch_s:.2f",
            "peak RSS MB": "peak_rss_mb:,.0f",
        },
    )
    speeds = {
        name: [result["tokens_per_cpu_s"] for result in results if result["loader"] == name]
        for name in BUILD
    }
    ratios = [ours / stock for ours, stock in zip(speeds["zephon"], speeds["stock"], strict=True)]
    for name, values in speeds.items():
        print(f"{name}: median {statistics.median(values):,.0f} tokens per CPU-second")
    listed = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    print(f"zephon / stock in each pair: {listed}; median {statistics.median(ratios):.1f}")
    return {"results": results, "ratios": ratios}


def compare_first_batch(args: argparse.Namespace) -> dict[str, Any]:
    """Time the first batch; the stock loader converts the corpus on first use, so it runs twice."""
    with tempfile.TemporaryDirectory(dir=args.work) as fresh:
        results = [
            run_worker("zephon", Path(fresh)),
            run_worker("stock", Path(fresh)) | {"loader": "stock, first use"},
            run_worker("stock", Path(fresh)) | {"loader": "stock, converted"},
        ]
    print_table(results, {"first batch s": "first_batch_s:.2f", "peak RSS MB": "peak_rss_mb:,.0f"})
    return {"results": results}


def compare_state(args: argparse.Namespace) -> dict[str, Any]:
    """Weigh a checkpoint's loader entries: 64 lanes of ours, one rank of the stock loader's."""
    results = [run_worker(name, args.work / "hf") for name in BUILD]
    print_table(
        results,
        {
            "entries": "entries:d",
            "median bytes": "median_bytes:,.0f",
            "largest bytes": "largest_bytes:,d",
            "total bytes": "total_bytes:,d",
            "state_dict ms": "state_dict_ms:.2f",
        },
    )
    return {"results": results}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--first-batch", action="store_true", help="time the first batch instead")
    mode.add_argument("--state", action="store_true", help="weigh the state instead")
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each loader")
    parser.add_argument("--seconds", type=float, default=8, help="CPU-seconds of a measurement")
    parser.add_argument("--corpus-mb", type=int, help="default 256; 1024 with --first-batch")
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmark"))
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--worker", choices=list(BUILD), help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.corpus_mb is None:
        args.corpus_mb = 1024 if args.first_batch else BLOCK_MB

    if args.worker:
        print(json.dumps(measure(args)))
        return

    prepare(args.work, args.corpus_mb)
    versions = {name: version(name) for name in PACKAGES}
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(
        f"corpus {args.corpus_mb} MB, {SEQ_LEN} tokens a sequence, batches of {LOCAL_BATCH_SIZE}\n"
    )
    compare = compare_throughput
    if args.first_batch:
        compare = compare_first_batch
    elif args.state:
        compare = compare_state
    report = {"versions": versions, "corpus_mb": args.corpus_mb} | compare(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
