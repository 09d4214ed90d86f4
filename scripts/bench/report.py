"""Tables, the facts about the machine, and the chart."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = [
    "torch",
    "torchtitan",
    "datasets",
    "numpy",
    "msgspec",
    "pyarrow",
    "tokenizers",
]
PACKAGES += ["gigatoken", "transformers", "zephon", "grain"]


def show(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Print one line a row; columns give the key and format spec under each title."""
    width = max([len(title), *(len(row["name"]) for row in rows)])
    print("  ".join([f"\n{title:<{width}}", *(f"{name:>13}" for name in columns)]))
    for row in rows:
        if "error" in row:
            print(f"{row['name']:<{width}}  {row['error']}")
            continue
        cells = []
        for column in columns.values():
            key, spec = column.split(":", 1)
            cells.append(format(format(row[key], spec), ">13"))
        print("  ".join([f"{row['name']:<{width}}", *cells]), flush=True)


def facts() -> dict[str, Any]:
    """Versions and the machine, for the JSON and the head of the output."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")


BARS = {
    "stock": "TorchTitan's loader",
    "zephon 0.2.0": "Zephon 0.2.0, inline",
    "zephon 0.2.0, mtp": "Zephon 0.2.0, mtp_mode",
    "grain, tokenizers": "Grain, tokenizers",
    "grain, gigatoken": "Grain, gigatoken",
    "ours, tokenizers": "torchtitan-zephon, tokenizers",
    "ours, audit on": "torchtitan-zephon, audit on",
    "ours": "torchtitan-zephon",
}


def draw(results: list[dict[str, Any]], machine: str, path: Path) -> None:
    """Write a bar chart of the main comparison: medians of tokens per CPU-second, log scale."""
    import statistics

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, values, low, high = [], [], [], []
    for name, label in BARS.items():
        mine = [r["tokens_per_cpu_s"] for r in results if r["name"] == name and "error" not in r]
        if mine:
            names.append(label)
            values.append(statistics.median(mine) / 1e6)
            low.append(min(mine) / 1e6)
            high.append(max(mine) / 1e6)
    order = sorted(range(len(values)), key=values.__getitem__)
    figure, axes = plt.subplots(figsize=(9, 0.52 * len(values) + 1.5), layout="constrained")
    for place, i in enumerate(order):
        ours = names[i].startswith("torchtitan-zephon")
        axes.barh(place, values[i], height=0.66, color="#0b6e69" if ours else "#9aa5b1")
        axes.plot([low[i], high[i]], [place, place], color="#1f2933", linewidth=1)
        axes.text(high[i] * 1.08, place, f"{values[i]:.2f} M", va="center", fontsize=10)
    axes.set_yticks(range(len(order)), [names[i] for i in order], fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(min(low) / 2.5, max(high) * 3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} M")
    axes.set_xlabel("tokens per CPU-second, log scale; the line runs from lowest to highest turn")
    axes.set_title(
        f"Raw JSONL to packed, shuffled batches of 2048 tokens\n{machine}",
        loc="left",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", which="major", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
