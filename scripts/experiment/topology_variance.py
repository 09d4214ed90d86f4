"""Experiment 2's results and its figure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .report import times
from .runs import LOADERS

PUBLISHED = {"DCLM Core": (0.82, 0.05), "FineWeb": (0.64, 0.011)}
"""Spread of benchmark scores over topologies, in points: standard loader, Zephon."""

COLORS = {"stock": "#d1495b", "zephon": "#00798c"}
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Repeat:
    """One loader's runs of one seed, which differ only in the number of ranks."""

    loader: str
    seed: int
    losses: dict[int, float]
    """Held-out loss of the last step by the number of ranks."""

    @property
    def spread(self) -> float:
        """The largest loss minus the smallest."""
        return max(self.losses.values()) - min(self.losses.values())


def repeats(rows: Sequence[dict[str, str]]) -> dict[str, list[Repeat]]:
    """The rows of runs.csv by loader and seed."""
    losses: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        by_ranks = losses.setdefault((row["loader"], int(row["seed"])), {})
        by_ranks[int(row["ranks"])] = float(row["held_out_loss"])
    return {
        loader: [
            Repeat(name, s, by_ranks) for (name, s), by_ranks in losses.items() if name == loader
        ]
        for loader in dict.fromkeys(loader for loader, _ in losses)
    }


def mean_spread(of_loader: Sequence[Repeat]) -> float:
    """The mean over the seeds."""
    return statistics.fmean(r.spread for r in of_loader)


def ratio(results: dict[str, list[Repeat]]) -> float:
    """The stock loader's mean spread over this loader's; infinite if this one has none at all."""
    ours = mean_spread(results["zephon"])
    return mean_spread(results["stock"]) / ours if ours else float("inf")


def seed_noise(of_loader: Sequence[Repeat]) -> float | None:
    """Spread over the seeds at a fixed number of ranks, mean over these; None for one seed."""
    if len(of_loader) < 2:
        return None
    by_ranks = [[r.losses[n] for r in of_loader] for n in of_loader[0].losses]
    return statistics.fmean(max(losses) - min(losses) for losses in by_ranks)


def draw(results: dict[str, list[Repeat]], path: Path) -> None:
    """Held-out loss by rank count for both loaders, and the spreads on a logarithmic scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1, 1, 0.9]})
    for ax, (loader, of_loader) in zip((left, middle), results.items(), strict=True):
        _draw_losses(ax, loader, of_loader)
    low = min(ax.get_ylim()[0] for ax in (left, middle))
    high = max(ax.get_ylim()[1] for ax in (left, middle))
    pad = 0.06 * (high - low)
    for ax in (left, middle):
        ax.set_ylim(low - pad, high + pad)
    left.set_ylabel("held-out loss after training")
    left.legend(frameon=False, fontsize=9)
    _draw_spreads(right, results)
    figure.savefig(path)


def _draw_losses(ax, loader: str, of_loader: Sequence[Repeat]) -> None:
    for repeat, marker in zip(of_loader, MARKERS, strict=False):
        ranks = sorted(repeat.losses)
        losses = [repeat.losses[n] for n in ranks]
        label = f"seed {repeat.seed}"
        ax.plot(range(len(ranks)), losses, marker=marker, color=COLORS[loader], lw=1.6, label=label)
        ax.set_xticks(range(len(ranks)), [str(n) for n in ranks])
    ax.margins(x=0.12)
    ax.set_xlabel("data-parallel ranks")
    ax.set_title(LOADERS[loader][0].upper() + LOADERS[loader][1:], fontsize=12)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_spreads(ax, results: dict[str, list[Repeat]]) -> None:
    spreads = [r.spread for of_loader in results.values() for r in of_loader]
    floor = min([s for s in spreads if s > 0], default=1e-9) / 5
    for place, (loader, of_loader) in enumerate(results.items()):
        color, mean = COLORS[loader], mean_spread(of_loader)
        for i, (repeat, marker) in enumerate(zip(of_loader, MARKERS, strict=False)):
            beside = place + 0.12 * (i - (len(of_loader) - 1) / 2)
            # No spread at all has no place on a logarithmic scale: hollow, at its lower end.
            fill = {} if repeat.spread else {"mfc": "white", "clip_on": False}
            at = repeat.spread or floor
            ax.plot(beside, at, marker=marker, ms=7, color=color, ls="none", zorder=3, **fill)
        ax.hlines(mean or floor, place - 0.28, place + 0.28, color=color, lw=2)
        ax.annotate(
            f"mean {mean:#.2g}",
            (place, max(r.spread for r in of_loader) or floor),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )
    ax.set_yscale("log")
    ax.set_ylim(floor, (max(spreads) or floor) * 8)
    ax.set_xlim(-0.6, len(results) - 0.4)
    ax.set_xticks(range(len(results)), [LOADERS[loader] for loader in results], fontsize=9)
    title = f"{times(ratio(results))} to 1" if mean_spread(results["zephon"]) else "some to none"
    ax.set_title(f"Largest minus smallest: {title}", fontsize=11)
    ax.set_ylabel("spread over rank counts, log scale")
    ax.grid(alpha=0.25, axis="y")
    ax.spines[["top", "right"]].set_visible(False)
