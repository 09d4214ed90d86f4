"""Prints the demo's two runs side by side and fails unless every step was fed the same bytes.

Usage: python scripts/demo_table.py FOLDER STEPS

Digests come from FOLDER/{reference,resumed}/audit/global_batches.jsonl, losses from
FOLDER/logs/{reference,resumed}*.log.
"""

import json
import re
import sys
from pathlib import Path

LOSS = re.compile(r"(?<!validate )step: +(\d+) .*?loss: +([\d.]+)")
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def read_audit(path: Path) -> dict[int, dict]:
    """Return the audit log's records by step; a step run twice counts with its last record."""
    if not path.exists():
        return {}
    return {record["step"]: record for record in map(json.loads, path.read_text().splitlines())}


def read_losses(logs: list[Path]) -> dict[int, float]:
    """Return the loss of each step that TorchTitan logged."""
    text = COLOR.sub("", "\n".join(log.read_text(errors="replace") for log in logs))
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


def cell(values: dict, step: int, key: str) -> str:
    """Return the field of a step's record, shortened, or a dash where the step is missing."""
    return str(values[step][key])[:16] if step in values else "-"


def main(folder: Path, steps: int) -> int:
    """Print the table and return the number of steps that differ or are missing."""
    reference = read_audit(folder / "reference/audit/global_batches.jsonl")
    resumed = read_audit(folder / "resumed/audit/global_batches.jsonl")
    losses = [
        read_losses(sorted((folder / "logs").glob(f"{run}*.log")))
        for run in ("reference", "resumed")
    ]

    header = ("step", "reference run", "ranks", "loss", "resumed run", "ranks", "loss", "")
    row = "{:>4}  {:<16}  {:>5}  {:>7}  {:<16}  {:>5}  {:>7}  {}"
    print("\n" + row.format(*header).rstrip())
    bad = 0
    for step in range(1, steps + 1):
        same = (
            step in reference
            and step in resumed
            and reference[step]["sha256"] == resumed[step]["sha256"]
        )
        bad += not same
        cells = []
        for run, loss in zip((reference, resumed), losses, strict=True):
            cells += [cell(run, step, "sha256"), cell(run, step, "dp_degree")]
            cells.append(f"{loss[step]:.4f}" if step in loss else "-")
        print(row.format(step, *cells, "same" if same else "DIFFERENT"))

    if bad:
        print(f"\n{bad} of {steps} global batches differ or are missing.")
    else:
        degrees = dict.fromkeys(str(resumed[step]["dp_degree"]) for step in range(1, steps + 1))
        print(
            f"\nAll {steps} global batches are the same bytes: one run without a stop on "
            f"{reference[1]['dp_degree']} ranks, one resumed on {', '.join(degrees)} ranks."
        )
    common = losses[0].keys() & losses[1].keys()
    if common:
        gap = max(abs(losses[0][step] - losses[1][step]) for step in common)
        print(f"Losses differ by at most {gap:.5f}: other rank counts add floats in another order.")
    return bad


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])) > 0)
