"""The axes of size: start, resume, growth and memory over time."""

import shutil
from pathlib import Path
from typing import Any

from bench import corpora
from bench.axes import SPEED, Bench, Result, in_turns, medians
from bench.report import show


def start(bench: Bench) -> Result:
    """Seconds from construction to the first batch: large files, many files, many lanes."""
    work, small = bench.work, bench.smoke
    one = str(corpora.make_corpus(work, 4 if small else 1024, "words"))
    shards = 200 if small else 100_000
    many = str(corpora.make_tiny_shards(work, shards))
    huge = f"bench://repeat/{100 * 10**9}/corpus.jsonl"
    job, results = bench.job, []
    shutil.rmtree(work / "hf-start", ignore_errors=True)
    fresh = {"hf_cache": str(work / "hf-start")}
    one_name = Path(one).name
    for lanes in bench.sizes([1, 64, 1024]):
        how: Result = {"lanes": lanes, "batch": max(8, lanes)}
        names = {
            f"ours, {one_name}, {lanes} lanes": job("ours", "first_batch", corpus=one, **how),
            f"ours, {shards:,} shards, {lanes} lanes": job(
                "ours", "first_batch", corpus=many, **how
            ),
            f"ours, virtual 100 GB, {lanes} lanes": job(
                "ours", "virtual_first_batch", corpus=huge, **how
            ),
        }
        results += in_turns(bench, names, min(2, bench.pairs))
    stock = {
        f"stock, {one_name}, first use": job("stock", "first_batch", corpus=one, options=fresh),
        f"stock, {one_name}, converted": job("stock", "first_batch", corpus=one, options=fresh),
        f"zephon 0.2.0, {shards:,} shards": job(
            "zephon", "first_batch", corpus=many, options={"chunk_size": 64}
        ),
        f"zephon 0.2.0, {one_name}": job("zephon", "first_batch", corpus=one),
        f"zephon 0.2.0, {one_name}, 64 lanes": job("zephon", "first_batch", corpus=one, lanes=64),
        f"grain, {one_name}": job("grain", "first_batch", corpus=one, backend="gigatoken"),
    }
    results += in_turns(bench, stock, 1)
    rows = medians(results, ["first_batch_s", "built_s", "rss_mb"])
    columns = {
        "first batch s": "first_batch_s:.2f",
        "of it building": "built_s:.2f",
        "spread": "spread:.0%",
        "RSS MB": "rss_mb:,.0f",
    }
    show("start: construction to first batch", rows, columns)
    return {"results": results, "rows": rows}


def resume(bench: Bench) -> Result:
    """Load to first batch, against shuffle buffer, lanes and how far the run had come."""
    cases: list[tuple[str, Result, int]] = [
        ("ours", {"lanes": 64, "batch": 64}, 60),
        ("zephon", {"lanes": 1}, 60),
        ("ours", {"lanes": 1, "batch": 8}, 60),
        ("ours", {"lanes": 1, "batch": 8}, 300),
        ("ours", {"lanes": 1, "batch": 8}, 600),
        ("zephon", {"lanes": 1}, 300),
        ("zephon", {"lanes": 1}, 600),
        ("ours", {"lanes": 64, "batch": 64}, 600),
        ("ours", {"lanes": 64, "batch": 64, "buffer_size": 10_000}, 600),
        ("ours", {"lanes": 64, "batch": 64, "packing": "first_fit"}, 600),
        ("ours", {"lanes": 1024, "batch": 1024}, 640),
    ]
    state = bench.work / "state.pickle"
    results = []
    for peer, how, batches in bench.sizes(cases):
        options: Result = {"batches": batches, "state": str(state)}
        saved = bench.run(bench.job(peer, "save", options=options, **how))
        result = bench.run(bench.job(peer, "resume", options=options, **how))
        tokens = batches * 8 * 2048 / 1e6
        name = f"{peer}, {how}, after {tokens:.1f} M tokens"
        results.append({"name": name, "turn": 0} | saved | result)
    state.unlink(missing_ok=True)
    rows = medians(
        results,
        [
            "load_to_batch_s",
            "build_to_batch_s",
            "entries",
            "median_bytes",
            "total_bytes",
        ],
    )
    columns = {
        "load-batch s": "load_to_batch_s:.2f",
        "build-batch s": "build_to_batch_s:.2f",
        "entries": "entries:.0f",
        "median bytes": "median_bytes:,.0f",
        "total bytes": "total_bytes:,.0f",
    }
    show("resume", rows, columns)
    calls = in_turns(
        bench,
        {
            f"ours, {lanes} lanes": bench.job(
                "ours",
                "state_every_step",
                lanes=lanes,
                batch=lanes,
                options={"steps": 30},
            )
            for lanes in bench.sizes([8, 64, 1024])
        },
        1,
    )
    rows = medians(calls, ["state_dict_ms", "slowest_ms", "total_bytes"])
    columns = {
        "median ms": "state_dict_ms:.2f",
        "slowest ms": "slowest_ms:.2f",
        "bytes": "total_bytes:,.0f",
    }
    show("state_dict() at every step", rows, columns)
    return {"results": results, "state_dict": calls}


def growth(bench: Bench) -> Result:
    """Speed, memory and threads as the job grows."""
    job, found = bench.job, {}
    columns = {
        "tokens/CPU-s": "tokens_per_cpu_s:,.0f",
        "tokens/s": "tokens_per_s:,.0f",
        "spread": "spread:.0%",
        "peak RSS MB": "peak_rss_mb:,.0f",
        "threads": "threads:.0f",
    }

    def measure(title: str, jobs: dict[str, Any], turns: int = 2) -> None:
        found[title] = in_turns(bench, jobs, 1 if bench.smoke else turns)
        keys = [*SPEED, "threads"]
        extra = {}
        if title == "footprint":
            keys, extra = [*keys, "beyond_mb"], {"beyond MB": "beyond_mb:,.0f"}
        show(title, medians(found[title], keys), columns | extra)

    large = str(corpora.make_corpus(bench.work, 4 if bench.smoke else 1024))
    measure(
        "lanes",
        {
            f"{lanes} lanes, {Path(corpus).name}": job(
                "ours", "throughput", corpus=corpus, lanes=lanes, batch=max(8, lanes)
            )
            for corpus in bench.sizes([large, bench.data()])
            for lanes in bench.sizes([8, 1024, 1, 64, 256])
        },
    )
    measure(
        "datasets",
        {
            f"{count} datasets": job("ours", "throughput", datasets=count)
            for count in bench.sizes([2, 50, 1, 10])
        },
    )
    documents = {}
    for characters in bench.sizes([10, 1000, 100_000, 5_000_000]):
        corpus = corpora.make_one_word_documents(bench.work, characters, 1 if bench.smoke else 32)
        documents[f"words of {characters:,}"] = job("ours", "throughput", corpus=str(corpus))
    measure("length of one-word documents", documents, 1)
    measure(
        "ranks, of which one is run",
        {
            f"rank 0 of {ranks}": job(
                "ours", "throughput", lanes=64, batch=8, options={"ranks": ranks}
            )
            for ranks in bench.sizes([1, 8, 64, 1024])
        },
        1,
    )
    measure(
        "footprint",
        {
            "64 lanes, 20 datasets": job(
                "ours", "footprint", lanes=64, batch=64, datasets=20, audit=True
            )
        },
        1,
    )
    return found


def memory(bench: Bench) -> Result:
    """Resident size along a stream of ever-new words."""
    tokens = 1_000_000 if bench.smoke else bench.tokens
    # Three bytes a token at most, and twice that, so that nothing is read a second time.
    corpus = f"bench://words/{tokens * 6}/corpus.jsonl"
    result = bench.run(
        bench.job(
            "ours",
            "memory",
            corpus=corpus,
            lanes=64,
            batch=64,
            options={"tokens": tokens},
        ),
        7200,
    )
    rows = [{"name": f"{s['tokens'] / 1e6:,.0f} M tokens", **s} for s in result.get("samples", [])]
    if "error" in result:
        rows = [{"name": "ours", **result}]
    columns = {"RSS MB": "rss_mb:,.0f", "peak RSS MB": "peak_rss_mb:,.0f"}
    show("memory over time, words ever new", rows, columns)
    return result
