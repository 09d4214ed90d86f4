"""A run as a barcode: per step the leading bits of its digest as bars.

Green where the whole digest agrees with the first run's, red where it does not, blank where the run
has no such step. Where steps outnumber the places, each place stands for several steps, and is red
if any of them is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BARS = " ▐▌█"  # two bits a character: left half, right half
_GREEN, _RED, _PLAIN = "\033[32m", "\033[31m", "\033[0m"
_PNG_BARS = 2400  # bars side by side that a figure shows apart
_GREEN_RGB, _RED_RGB, _BACKGROUND_RGB = (0.10, 0.55, 0.25), (0.84, 0.15, 0.16), (0.93, 0.96, 0.93)
_RED_BACKGROUND_RGB, _BLANK_RGB = (0.99, 0.88, 0.86), (1.0, 1.0, 1.0)


class NoMatplotlibError(RuntimeError):
    """A figure was asked for, and matplotlib is not installed."""


@dataclass(frozen=True)
class Track:
    """One run's digests by step, and the steps in which it disagrees with the first run."""

    name: str
    digests: dict[int, str]
    """SHA-256 of each step, hex."""
    differing: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Place:
    """One place of a barcode: ``bits`` is None where the run has none of its steps."""

    bits: int | None
    same: bool


def _steps(tracks: Sequence[Track]) -> tuple[int, int]:
    known = [s for t in tracks for s in t.digests]
    if not known:
        raise ValueError("a barcode needs a step at least")
    return min(known), max(known)


def _places(track: Track, first: int, last: int, width: int, bits: int) -> list[_Place]:
    """``track`` in places of ``width`` steps, each with the first step's leading ``bits`` bits."""
    places = []
    for start in range(first, last + 1, width):
        there = [s for s in range(start, min(start + width, last + 1)) if s in track.digests]
        if not there:
            places.append(_Place(None, True))
            continue
        wrong = [s for s in there if s in track.differing]
        shown = track.digests[(wrong or there)[0]]
        places.append(_Place(int(shown[:8], 16) >> (32 - bits), not wrong))
    return places


def terminal(tracks: Sequence[Track], *, columns: int = 80, color: bool = True) -> str:
    """The barcodes, one run a line, below a scale of steps; a line of ``^`` marks what differs."""
    first, last = _steps(tracks)
    label = min(24, max(len(t.name) for t in tracks))
    room = max(16, columns - label - 2)
    steps = last - first + 1
    width = max(1, math.ceil(steps / room))  # steps a place
    cells = 2 if 2 * steps <= room else 1  # characters a place
    count = math.ceil(steps / width)
    lines = [" " * (label + 2) + _scale(first, width, count, cells)]
    for track in tracks:
        text, marks, tinted = "", "", ""
        for place in _places(track, first, last, width, 2 * cells):
            if place.bits is None:
                text, marks = text + " " * cells, marks + " " * cells
                continue
            # A place with no bar would look like no step.
            bars = "".join(_BARS[place.bits >> 2 * i & 3] for i in reversed(range(cells)))
            bars = "·" * cells if not bars.strip() else bars
            tint = _GREEN if place.same else _RED
            if color and tint != tinted:
                text, tinted = text + tint, tint
            text += bars
            marks += (" " if place.same else "^") * cells
        name = track.name if len(track.name) <= label else "…" + track.name[1 - label :]
        lines.append(f"{name:<{label}}  {text}{_PLAIN if tinted else ''}".rstrip())
        if marks.strip():
            lines.append(" " * (label + 2) + marks.rstrip())
    if width > 1:
        lines.append(" " * (label + 2) + f"each place is {width} steps")
    return "\n".join(lines)


def _scale(first: int, width: int, count: int, cells: int) -> str:
    text = ""
    for place in range(count):
        at = place * cells
        number = str(first + place * width)
        # Some ten numbers, none running into the next or over the end.
        if len(text) <= at and place % max(1, count // 8) == 0:
            text = text.ljust(at)
            text += f"{number} " if at + len(number) <= count * cells else ""
    return text.rstrip()


def png(
    tracks: Sequence[Track], path: Path, *, title: str = "SHA-256 of each global batch"
) -> None:
    """The barcodes as a figure.

    Raises:
        NoMatplotlibError: it is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlibError(
            "a figure needs matplotlib: pip install 'torchtitan-zephon[report]'"
        ) from error
    figure = Figure(figsize=(11, 0.9 + 0.62 * len(tracks)), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(tracks), 1, sharex=True, squeeze=False)[:, 0]
    for ax, track in zip(axes, tracks, strict=True):
        draw(ax, track, tracks)
    axes[-1].tick_params(bottom=True, labelbottom=True, labelsize=8)
    axes[-1].set_xlabel("step", fontsize=9)
    axes[0].set_title(title, fontsize=10, loc="left")
    figure.savefig(path)


def draw(ax: object, track: Track, tracks: Sequence[Track]) -> None:
    """One run's barcode into matplotlib ``Axes``, on the scale of steps that ``tracks`` share."""
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

    assert isinstance(ax, Axes)
    first, last = _steps(tracks)
    steps = last - first + 1
    bits = max(4, min(16, _PNG_BARS // steps))
    width = max(1, math.ceil(steps * bits / _PNG_BARS))
    places = _places(track, first, last, width, bits)
    image = np.ones((1, len(places) * bits, 3))
    for i, place in enumerate(places):
        here = image[0, i * bits : (i + 1) * bits]
        if place.bits is None:
            here[:] = _BLANK_RGB
            continue
        here[:] = _BACKGROUND_RGB if place.same else _RED_BACKGROUND_RGB
        # Of thousands of steps one in red would be too thin to see if it had gaps.
        solid = not place.same and bits == 4
        bars = [solid or place.bits >> b & 1 == 1 for b in reversed(range(bits))]
        here[bars] = _GREEN_RGB if place.same else _RED_RGB
    left = first - 0.5
    extent = (left, left + len(places) * width, 0.0, 1.0)
    ax.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    ax.set_xlim(left, last + 0.5)
    ax.set_yticks([])
    ax.tick_params(bottom=False, labelbottom=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel(_wrapped(track.name), rotation=0, ha="right", va="center", fontsize=8)
    for side in ax.spines.values():
        side.set_visible(False)
    if track.differing:
        # One bar among thousands is easily overlooked.
        step = min(track.differing)
        ax.plot([step], [1.0], marker="v", color=_RED_RGB, markersize=6, clip_on=False)
        side = "right" if step > (first + last) / 2 else "left"
        ax.annotate(
            f"step {step}" + (f", {len(track.differing)} in all" * (len(track.differing) > 1)),
            (step, 1.0),
            xytext=(-6 if side == "right" else 6, 2),
            textcoords="offset points",
            ha=side,
            fontsize=7,
            color=_RED_RGB,
            annotation_clip=False,
        )


def _wrapped(name: str) -> str:
    return name if len(name) <= 28 else "…" + name[-27:]
