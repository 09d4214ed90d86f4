"""Experiment 1's results and its figure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_zephon.audit import barcode

from .runs import LOADERS

COLORS = ["#d1495b", "#edae49", "#00798c", "#7b5ea7", "#5a8f29"]


@dataclass(frozen=True)
class Run:
    """One run, and how it compares with its loader's reference after the checkpoint."""

    title: str
    ranks: int
    losses: dict[int, float]
    digests: dict[int, str]
    differing: frozenset[int]
    """Steps whose global batch is not the reference's."""
    largest_gap: float
    """Largest distance of its loss from the reference's, over all its steps."""
    final: str
    """Its loss at its last step, and the reference's."""

    rows: int
    """How many rows it was trained on."""
    seen_again: int
    """How many of them its loader's reference was trained on by the checkpoint."""

    @property
    def steps(self) -> int:
        """How many steps it made."""
        return len(self.digests)

    @property
    def equal(self) -> int:
        """How many of them had the reference's global batch."""
        return self.steps - len(self.differing)

    def verdict(self, plain: bool = False) -> str:
        """How many global batches agree; marked good or bad for a report's table."""
        mark = "" if plain else "- " if self.differing else "+ "
        return f"{mark}{self.equal} of {self.steps}"


@dataclass(frozen=True)
class LoaderResult:
    """One loader's runs."""

    loader: str
    reference: Run
    resumed: list[Run]


def summarize(rows: Sequence[dict[str, str]], checkpoint: int) -> list[LoaderResult]:
    """Compare the runs in the rows of steps.csv with their references.

    Raises:
        ValueError: a resumed run did not start right after the checkpoint.
    """
    losses: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    digests: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    ranks: dict[tuple[str, str], int] = {}
    trained: Counter[tuple[str, str]] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        key = (row["loader"], row["run"])
        losses[key][int(row["step"])] = float(row["loss"])
        digests[key][int(row["step"])] = row["sha256"]
        ranks[key] = int(row["ranks"])
        trained[key] += int(row["rows"])
        seen[key] += int(row["rows_seen"])
    results = []
    for loader in dict.fromkeys(loader for loader, _ in ranks):
        base = (loader, "reference")
        runs = []
        for key in (k for k in ranks if k[0] == loader):
            first = min(losses[key])
            if key != base and first != checkpoint + 1:
                raise ValueError(
                    f"{key[0]}/{key[1]}: started at step {first}, not {checkpoint + 1}"
                )
            last = max(losses[key])
            runs.append(
                Run(
                    title=f"reference, {_ranks(ranks[key])}" if key == base else _ranks(ranks[key]),
                    ranks=ranks[key],
                    losses=losses[key],
                    digests=digests[key],
                    differing=frozenset(
                        s for s, d in digests[key].items() if digests[base][s] != d
                    ),
                    largest_gap=max(abs(x - losses[base][s]) for s, x in losses[key].items()),
                    final=f"{losses[key][last]:.5f} ({losses[base][last]:.5f})",
                    rows=trained[key],
                    seen_again=seen[key],
                )
            )
        results.append(LoaderResult(loader, runs[0], runs[1:]))
    return results


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def draw(results: Sequence[LoaderResult], checkpoint: int, path: Path) -> None:
    """Loss curves, distances from the reference, and barcodes, a column for each loader."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = 1 + len(results[0].resumed)
    figure = Figure(figsize=(12, 6.2 + 0.36 * runs), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        2 + runs,
        len(results),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [3.6, 1.5, *[0.42] * runs]},
    )
    for column, result in enumerate(results):
        loss, gap, *bars = axes[:, column]
        everything = [result.reference, *result.resumed]
        loss.set_title(LOADERS[result.loader][0].upper() + LOADERS[result.loader][1:], fontsize=13)
        steps, values = zip(*sorted(result.reference.losses.items()), strict=True)
        loss.plot(steps, values, color="black", lw=2.6, label=result.reference.title, zorder=2)
        for i, run in enumerate(result.resumed):
            steps, values = zip(*sorted(run.losses.items()), strict=True)
            color = COLORS[i % len(COLORS)]
            # Narrower than the reference and dashed out of step, so that equal curves all show.
            style = {"color": color, "lw": 1.5, "ls": "-" if run.differing else (3 * i, (3, 6))}
            loss.plot(steps, values, label=f"resumed on {run.title}", zorder=3, **style)
            differences = [run.losses[s] - result.reference.losses[s] for s in steps]
            gap.plot(steps, differences, color=color, lw=1.5, ls=style["ls"])
        gap.axhline(0, color="black", lw=0.8, zorder=1)
        for ax in (loss, gap):
            ax.axvline(checkpoint + 0.5, color="#57606a", lw=1, ls="--")
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        loss.annotate(
            f"checkpoint, step {checkpoint}",
            (checkpoint + 0.5, 0.04),
            xycoords=("data", "axes fraction"),
            xytext=(-5, 0),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#57606a",
        )
        for line in loss.legend(frameon=False, fontsize=9, loc="upper right").get_lines():
            line.set_linestyle("-")
        worst = max(run.largest_gap for run in result.resumed)
        note = {"fontsize": 9, "loc": "left", "color": "#57606a"}
        gap.set_title(f"largest distance from the reference: {worst:#.2g}", **note)
        bars[0].set_title("SHA-256 of each global batch", **note)
        tracks = [barcode.Track(r.title, r.digests, r.differing) for r in everything]
        for ax, run, track in zip(bars, everything, tracks, strict=True):
            barcode.draw(ax, track, tracks)
            # Its note of the first difference would cover the row above: rows are narrow here.
            for artist in [*ax.texts, *ax.lines]:
                artist.remove()
            ax.set_ylabel(run.title, rotation=0, ha="right", va="center", fontsize=9)
        bars[-1].tick_params(bottom=True, labelbottom=True)
        bars[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        bars[-1].set_xlabel("step")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("loss minus\nreference's")
    for row in axes[:2]:
        limits = [ax.get_ylim() for ax in row]
        for ax in row:
            ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    figure.savefig(path)
