"""The axes: which measurements are made, at which sizes, and the table that each prints.

Every axis takes the `Bench` and returns its results, which go into the JSON as they are. Loaders
are measured in turns (A B A B), so that a machine that slows down slows all of them.
"""

import socket
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import corpora
from bench.peers import ZEPHON_SETTINGS
from bench.process import Job, run, run_forked
from bench.report import show
from bench.tasks import TASKS

Result = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Sizes and places of a run of the benchmark."""

    work: Path
    """Folder of corpora and tokenizers."""
    seconds: float
    """Seconds that a throughput is measured for."""
    pairs: int
    """Turns of each comparison."""
    smoke: bool
    """The smallest sizes, to see that everything runs."""
    corpus: str = "words"
    """`words` (generated) or `python` (sources of the installed packages)."""
    tokens: int = 20_000_000
    """Of the memory axis."""

    @property
    def megabytes(self) -> int:
        return 4 if self.smoke else 64

    def data(self, fmt: str = "jsonl") -> str:
        """The corpus of the throughput axes, in shards of 4 MB: see docs/benchmark.md."""
        if fmt.startswith("tokens-"):
            texts = Path(self.data("parquet"))
            tokenizer = corpora.make_tokenizer(self.work)
            kind = fmt.removeprefix("tokens-")
            return str(corpora.make_token_corpus(self.work, texts, tokenizer, kind))
        size = self.megabytes
        return str(corpora.make_corpus(self.work, size, self.corpus, fmt, max(2, size // 4)))

    def job(self, peer: str, task: str, **settings: Any) -> Job:
        """A measurement on the corpus and tokenizer of this run, unless told otherwise."""
        if "corpus" not in settings:
            settings["corpus"] = self.data(settings.get("fmt", "jsonl"))
        settings.setdefault("tokenizer", str(corpora.make_tokenizer(self.work)))
        settings.setdefault("seconds", self.seconds)
        options = {"hf_cache": str(self.work / "hf")}
        settings["options"] = options | settings.get("options", {})
        return Job(task=task, peer=peer, **settings)

    def run(self, job: Job, timeout: float = 600) -> Result:
        """Make a measurement: in a process of its own, unless this is a smoke test."""
        if self.smoke:
            return run_forked(job, TASKS[job.task])
        return run(job, timeout)

    def sizes(self, values: list[Any]) -> list[Any]:
        """The values of an axis; of a smoke test only the first."""
        return values[:1] if self.smoke else values


def in_turns(bench: Bench, jobs: dict[str, Job], pairs: int | None = None) -> list[Result]:
    """Run every job in turns; one result a job and turn, under the job's name.

    A smoke test takes one job a peer, task and format.
    """
    if bench.smoke:
        kinds = [(job.peer, job.task, job.fmt, job.options.get("held")) for job in jobs.values()]
        jobs = {n: j for i, (n, j) in enumerate(jobs.items()) if kinds.index(kinds[i]) == i}
        return [{"name": n, "turn": 0} | bench.run(job) for n, job in jobs.items()]
    results = []
    for turn in range(pairs or bench.pairs):
        for name, job in jobs.items():
            results.append({"name": name, "turn": turn} | bench.run(job, 300))
    return results


def medians(results: list[Result], keys: list[str]) -> list[Result]:
    """One row a name: the medians over the turns, and the spread of the first key in percent."""
    rows = []
    for name in dict.fromkeys(r["name"] for r in results):
        mine = [r for r in results if r["name"] == name and "error" not in r]
        if not mine:
            error = next(r["error"] for r in results if r["name"] == name)
            rows.append({"name": name, "error": error})
            continue
        row: Result = {"name": name}
        for key in keys:
            row[key] = statistics.median(r[key] for r in mine)
        values = [r[keys[0]] for r in mine]
        row["spread"] = (max(values) - min(values)) / row[keys[0]] if row[keys[0]] else 0.0
        rows.append(row)
    return rows


def ratio(results: list[Result], above: str, below: str, key: str) -> Result:
    """The ratio of two names in each turn, and the median of those."""
    by_turn: dict[int, dict[str, float]] = {}
    for r in results:
        if "error" not in r:
            by_turn.setdefault(r["turn"], {})[r["name"]] = r[key]
    ratios = [t[above] / t[below] for t in by_turn.values() if above in t and below in t]
    name = f"{above} / {below}"
    if not ratios:
        return {"name": name, "error": "not measured"}
    return {"name": name, "ratios": ratios, "median": statistics.median(ratios)}


SPEED = ["tokens_per_cpu_s", "tokens_per_s", "first_batch_s", "peak_rss_mb"]
SPEED_COLUMNS = {
    "tokens/CPU-s": "tokens_per_cpu_s:,.0f",
    "tokens/s": "tokens_per_s:,.0f",
    "spread": "spread:.0%",
    "first batch s": "first_batch_s:.2f",
    "peak RSS MB": "peak_rss_mb:,.0f",
}


def throughput(bench: Bench) -> Result:
    """Tokens per second and CPU-second of all loaders: the main comparison."""
    found: Result = {}
    job = bench.job
    found["main"] = in_turns(
        bench,
        {
            "ours": job("ours", "throughput"),
            "ours, audit on": job("ours", "throughput", audit=True),
            "ours, tokenizers": job("ours", "throughput", backend="tokenizers"),
            "stock": job("stock", "throughput"),
            "zephon 0.2.0": job("zephon", "throughput"),
            "zephon 0.2.0, mtp": job("zephon", "throughput", options={"mode": "mtp"}),
            "grain, tokenizers": job("grain", "throughput", backend="tokenizers"),
            "grain, gigatoken": job("grain", "throughput", backend="gigatoken"),
        },
    )
    show("JSONL, wrap, 1 thread", medians(found["main"], SPEED), SPEED_COLUMNS)
    machinery = {"tokenizer": str(corpora.make_byte_tokenizer(bench.work))}
    found["machinery"] = in_turns(
        bench,
        {
            "ours, bytes": job("ours", "throughput", **machinery),
            "zephon 0.2.0, bytes": job("zephon", "throughput", backend="bytes"),
            "grain, bytes": job("grain", "throughput", backend="bytes"),
            "ours, ids in Arrow": job("ours", "throughput", fmt="tokens-arrow"),
            "ours, ids in Parquet": job("ours", "throughput", fmt="tokens-parquet"),
            "zephon 0.2.0, ids in Parquet": job("zephon", "throughput", fmt="tokens-parquet"),
            "grain, ids in Parquet": job("grain", "throughput", fmt="tokens-parquet"),
        },
    )
    title = "the machinery alone"
    show(title, medians(found["machinery"], SPEED), SPEED_COLUMNS)
    key = "tokens_per_cpu_s"
    main, bytes_ = found["main"], found["machinery"]
    found["ratios"] = [
        ratio(main, "ours", "zephon 0.2.0", key),
        ratio(main, "ours", "stock", key),
        ratio(main, "ours", "grain, gigatoken", key),
        ratio(main, "ours", "grain, tokenizers", key),
        ratio(main, "ours, audit on", "ours", key),
        ratio(main, "ours, tokenizers", "zephon 0.2.0", key),
        ratio(bytes_, "ours, ids in Arrow", "zephon 0.2.0, ids in Parquet", key),
        ratio(bytes_, "ours, ids in Parquet", "zephon 0.2.0, ids in Parquet", key),
        ratio(bytes_, "ours, ids in Parquet", "grain, ids in Parquet", key),
        ratio(bytes_, "ours, bytes", "zephon 0.2.0, bytes", key),
        ratio(bytes_, "ours, bytes", "grain, bytes", key),
    ]
    show("ratios of tokens per CPU-second", found["ratios"], {"median": "median:.2f"})
    return found


def zephon(bench: Bench) -> Result:
    """Zephon 0.2.0 over its ways to run: the other axes use the first."""
    job = bench.job
    jobs = {
        f"zephon 0.2.0, {mode}": job("zephon", "throughput", options={"mode": mode})
        for mode in ZEPHON_SETTINGS
    }
    jobs["zephon 0.2.0, inline, chunks of 8192"] = job(
        "zephon", "throughput", options={"chunk_size": 8192}
    )
    results = in_turns(bench, jobs)
    show("Zephon 0.2.0, its ways to run", medians(results, SPEED), SPEED_COLUMNS)
    return {"results": results}


def formats(bench: Bench) -> Result:
    """Threads, Parquet and first_fit."""
    job = bench.job
    found: Result = {}
    threads = {
        f"ours, {backend}, {n} threads": job("ours", "throughput", backend=backend, threads=n)
        for n in (1, 2)
        for backend in ("auto", "tokenizers")
    }
    found["threads"] = in_turns(bench, threads)
    show("threads", medians(found["threads"], SPEED), SPEED_COLUMNS)
    found["thread_ratios"] = [
        ratio(
            found["threads"],
            f"ours, {b}, 2 threads",
            f"ours, {b}, 1 threads",
            "tokens_per_s",
        )
        for b in ("auto", "tokenizers")
    ]
    show("ratios of tokens per second", found["thread_ratios"], {"median": "median:.2f"})
    grain = {"backend": "gigatoken"}
    for fmt, packing in bench.sizes(
        [("parquet", "first_fit"), ("parquet", "wrap"), ("jsonl", "first_fit")]
    ):
        how: Result = {"fmt": fmt, "packing": packing}
        found[f"{fmt}_{packing}"] = in_turns(
            bench,
            {
                "ours": job("ours", "throughput", **how),
                "zephon 0.2.0": job("zephon", "throughput", **how),
                "grain, gigatoken": job("grain", "throughput", **how, **grain),
            },
            2,
        )
        rows = medians(found[f"{fmt}_{packing}"], [*SPEED, "fill"])
        show(f"{fmt}, {packing}", rows, SPEED_COLUMNS | {"fill": "fill:.1%"})
    return found


def limit(bench: Bench) -> Result:
    """How far the loader is from its parts: the tokenizer, parsing and copying alone."""
    results = in_turns(
        bench,
        {
            "ours": bench.job("ours", "throughput"),
            "ours, ids in Arrow": bench.job("ours", "throughput", fmt="tokens-arrow"),
            "limits": bench.job("ours", "limit"),
        },
    )
    texts, ids = (
        statistics.median(r["tokens_per_cpu_s"] for r in results if r["name"] == name)
        for name in ("ours", "ours, ids in Arrow")
    )
    rates = [r["rates"] for r in results if "rates" in r]
    rows = [
        {"name": "ours", "rate": texts, "share": 1.0, "ids_share": ids / texts},
        {"name": "ours, ids in Arrow", "rate": ids, "share": texts / ids, "ids_share": 1.0},
    ]
    for name in rates[0]:
        rate = statistics.median(r[name] for r in rates)
        rows.append({"name": name, "rate": rate, "share": texts / rate, "ids_share": ids / rate})
    columns = {
        "tokens/CPU-s": "rate:,.0f",
        "texts / this": "share:.0%",
        "ids / this": "ids_share:.0%",
    }
    show("distance to the limit", rows, columns)
    return {"results": results, "rows": rows}


def free_port() -> int:
    """A port for a process group of one."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def loop(bench: Bench) -> Result:
    """TorchTitan's training loop on the CPU, with the loader and with the same batches held."""
    tokenizer = str(corpora.make_tokenizer(bench.work, 4096))
    steps = 3 if bench.smoke else 30
    jobs = {
        name: bench.job(
            "ours",
            "loop",
            tokenizer=tokenizer,
            options={"held": held, "steps": steps, "port": free_port()},
        )
        for name, held in (("with the loader", False), ("batches held", True))
    }
    results = in_turns(bench, jobs)
    keys = ["step_ms", "wait_ms", "longest_wait_ms", "first_wait_ms", "waited_share"]
    rows = medians(results, [*keys, "cpu_s_a_step"])
    columns = {
        "step ms": "step_ms:.1f",
        "spread": "spread:.0%",
        "wait ms": "wait_ms:.3f",
        "longest wait": "longest_wait_ms:.3f",
        "first wait": "first_wait_ms:.1f",
        "waited": "waited_share:.3%",
    }
    show("the training loop", rows, columns)
    show(
        "step time",
        found := [ratio(results, "with the loader", "batches held", "step_ms")],
        {"median": "median:.4f"},
    )
    return {"results": results, "ratios": found}
