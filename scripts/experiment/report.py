"""A report as one HTML file: figures embedded, nothing loaded from elsewhere."""

import base64
import html
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ["torch", "torchtitan", "torchtitan-zephon", "datasets", "tokenizers", "matplotlib"]

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1b1f24; max-width: 60rem;
       margin: 2.5rem auto; padding: 0 1.25rem; background: #fff; }
h1 { font-size: 1.8rem; line-height: 1.2; margin-bottom: .4rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #d8dee4; }
.lead { font-size: 1.1rem; color: #424a53; }
figure { margin: 1.5rem 0; } figure img { width: 100%; height: auto; }
figcaption { font-size: .9rem; color: #57606a; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e4e8ec; }
td { white-space: nowrap; } th { background: #f6f8fa; }
th:first-child, td:first-child { text-align: left; }
td.good { color: #14713a; font-weight: 600; } td.bad { color: #b3201f; font-weight: 600; }
pre { background: #f6f8fa; padding: .8rem 1rem; font-size: .8rem; border-radius: 6px;
      overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .6rem 0; } summary { cursor: pointer; }
"""


def versions() -> dict[str, str]:
    """What the numbers depend on: processor, Python, packages."""
    found = {"processor": processor(), "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> str:
    """The GPUs if there are any, else the processor and its cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores"


def listed(numbers: Sequence[int]) -> str:
    """Numbers as a sentence lists them."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def times(ratio: float) -> str:
    """A ratio in words that claim no more than two digits."""
    return f"{float(f'{ratio:.2g}'):,.0f}" if math.isfinite(ratio) else "infinitely many"


def bullets(texts: Sequence[str]) -> str:
    """A list; the texts are escaped."""
    return "<ul>" + "".join(f"<li>{html.escape(t)}</li>" for t in texts) + "</ul>"


def heading(text: str) -> str:
    """A heading inside the page."""
    return f"<h2>{html.escape(text)}</h2>"


def figure(png: Path, caption: str) -> str:
    """A figure, embedded as a data URI."""
    data = base64.b64encode(png.read_bytes()).decode()
    text = html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a cell that starts with "+" or "-" and a space is a good or a bad one."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    kind = {"+ ": ' class="good"', "- ": ' class="bad"'}.get(text[:2], "")
    return f"<td{kind}>{html.escape(text[2:] if kind else text)}</td>"


def code(text: str, summary: str = "") -> str:
    """Text as it stands, folded away under `summary` if one is given."""
    block = f"<pre>{html.escape(text)}</pre>"
    return (
        f"<details><summary>{html.escape(summary)}</summary>{block}</details>" if summary else block
    )


def page(title: str, lead: str, parts: Sequence[str]) -> str:
    """The whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>'
        + "\n".join(parts)
        + "</body></html>\n"
    )


def how_it_ran(meta: dict[str, Any], toml: str, about: str) -> list[str]:
    """The end of a report: commands, from ``runs.json``, a training config, and the environment."""
    return [
        heading("Commands"),
        code(meta["command"]),
        code("\n".join(meta["commands"]), "the runs that it started"),
        code(toml, about),
        heading("Environment"),
        environment(meta["versions"]),
    ]


def environment(found: dict[str, str]) -> str:
    """The versions as a table."""
    return table(["what", "version"], [[k, v] for k, v in found.items()])
