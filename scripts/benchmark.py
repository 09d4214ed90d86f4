"""Measures this loader against others on the same corpus, and against its own limits.

Usage:
    python scripts/benchmark.py                       against TorchTitan's stock loader, in pairs
    python scripts/benchmark.py --first-batch         seconds to the first batch of 1 GB
    python scripts/benchmark.py --state               bytes in a checkpoint, and its milliseconds
    python scripts/benchmark.py --axis throughput     an axis (or several; or all), see below
    python scripts/benchmark.py --axis all --smoke    everything at the smallest sizes, in minutes

Axes: throughput formats zephon limit start resume growth memory loop. What each one measures, what
is fair about it and what is not, and measured tables, are in docs/benchmark.md. The peers come with
`pip install -e '.[bench]'`. Nothing is downloaded: corpora and tokenizers are made under --work.
"""

import argparse
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import axes, corpora, report, scale
from bench.axes import SPEED, SPEED_COLUMNS, Bench, in_turns, medians, ratio
from bench.peers import import_everything
from bench.process import ENVIRONMENT, Job, end_with_parent, finish
from bench.report import show
from bench.tasks import TASKS

STATE_LANES = 64
AXES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "throughput": axes.throughput,
    "formats": axes.formats,
    "zephon": axes.zephon,
    "limit": axes.limit,
    "start": scale.start,
    "resume": scale.resume,
    "growth": scale.growth,
    "memory": scale.memory,
    "loop": axes.loop,
}


def compare_throughput(bench: Bench, corpus: str) -> dict[str, Any]:
    """Run this loader at its defaults, audit on, and the stock loader in turns."""
    in_turns(bench, {"stock": bench.job("stock", "first_batch", corpus=corpus)}, 1)  # to Arrow
    jobs = {
        "ours": bench.job("ours", "throughput", corpus=corpus, audit=True),
        "stock": bench.job("stock", "throughput", corpus=corpus),
    }
    results = in_turns(bench, jobs)
    show("JSONL, wrap", medians(results, SPEED), SPEED_COLUMNS)
    found = ratio(results, "ours", "stock", "tokens_per_cpu_s")
    show("tokens per CPU-second", [found], {"ratio": "median:.1f"})
    return {"results": results, "ratios": found}


def compare_first_batch(bench: Bench, corpus: str) -> dict[str, Any]:
    """Time the first batch; the stock loader converts the corpus on first use, so it runs twice."""
    folder = bench.work / f"hf-{Path(corpus).name}-fresh"
    shutil.rmtree(folder, ignore_errors=True)
    cache = {"hf_cache": str(folder)}
    results = in_turns(
        bench,
        {
            "ours": bench.job("ours", "first_batch", corpus=corpus, audit=True),
            "stock, first use": bench.job("stock", "first_batch", corpus=corpus, options=cache),
            "stock, converted": bench.job("stock", "first_batch", corpus=corpus, options=cache),
        },
        1,
    )
    columns = {"first batch s": "first_batch_s:.2f", "RSS MB": "rss_mb:,.0f"}
    show("construction to first batch", results, columns)
    return {"results": results}


def compare_state(bench: Bench, corpus: str) -> dict[str, Any]:
    """Weigh a checkpoint's loader entries: 64 lanes of ours, one rank of the stock loader's."""
    how: dict[str, Any] = {"corpus": corpus, "options": {"steps": 20}}
    ours = bench.job("ours", "state_every_step", lanes=STATE_LANES, batch=STATE_LANES, **how)
    stock = bench.job("stock", "state_every_step", corpus=corpus, options={"steps": 160})
    results = in_turns(bench, {"ours": ours, "stock": stock}, 1)
    columns = {
        "entries": "entries:d",
        "median bytes": "median_bytes:,.0f",
        "largest bytes": "largest_bytes:,d",
        "total bytes": "total_bytes:,d",
        "state_dict ms": "state_dict_ms:.2f",
    }
    show("state", results, columns)
    return {"results": results}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--first-batch", action="store_true", help="time the first batch instead")
    mode.add_argument("--state", action="store_true", help="weigh the state instead")
    mode.add_argument("--axis", nargs="+", choices=[*AXES, "all"], help="measure these axes")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, one turn")
    parser.add_argument("--pairs", type=int, help="turns of each comparison, default 3")
    parser.add_argument("--seconds", type=float, help="CPU-seconds of a measurement, default 4")
    parser.add_argument("--corpus", choices=["words", "python"], default="words")
    parser.add_argument("--corpus-mb", type=int, help="default 256; 1024 with --first-batch")
    parser.add_argument("--tokens", type=float, default=2e7, help="of the memory axis, default 2e7")
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmark"))
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--chart", type=Path, help="write the main comparison to this PNG")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        end_with_parent()
        logging.disable(logging.INFO)
        job = Job(**json.loads(args.worker))
        import_everything(job.peer)
        finish(TASKS[job.task](job, args.scratch), args.scratch)

    if args.smoke:
        os.environ |= ENVIRONMENT
        for peer in ("ours", "stock", "zephon", "grain"):
            import_everything(peer)
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        work=args.work,
        seconds=args.seconds or (0.5 if args.smoke else 4),
        pairs=args.pairs or (1 if args.smoke else 3),
        smoke=args.smoke,
        corpus=args.corpus,
        tokens=int(args.tokens),
    )
    facts = report.facts()
    print(f"Python {facts['python']}, {facts['cores']} cores, {facts['cpu']}")
    print(", ".join(f"{name} {number}" for name, number in facts["versions"].items()))
    results: dict[str, Any] = {"facts": facts}
    if args.axis:
        for name in AXES if "all" in args.axis else args.axis:
            results[name] = AXES[name](bench)
    else:
        megabytes = args.corpus_mb or (1024 if args.first_batch else 256)
        megabytes = 4 if args.smoke else megabytes
        corpus = str(corpora.make_corpus(args.work, megabytes, args.corpus))
        compare = compare_throughput
        if args.first_batch:
            compare = compare_first_batch
        elif args.state:
            compare = compare_state
        results |= compare(bench, corpus)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.chart and "throughput" in results:
        machine = f"{facts['cores']} cores, {facts['cpu']}; 1 thread"
        report.draw(results["throughput"]["main"], machine, args.chart)


if __name__ == "__main__":
    main()
