"""A run as its audit log tells it: one line for each step, the cursors, and the recipes."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_zephon.audit.log import BATCHES, CURSORS, AuditError, read_lines
from torchtitan_zephon.recipe import digest_json


@dataclass(frozen=True)
class LoggedStep:
    """One optimizer step as it was logged."""

    step: int
    sequences: int
    """Sequences of the run up to and with this step."""
    batch: int | None
    """Sequences of the step; None where the log does not tell."""
    sha256: str
    sums: tuple[int, int] | None
    """``step_sums`` of the step; None in a log that was written without them."""
    dp_degree: int
    recipe: str
    """First 12 hex digits of the recipe's fingerprint."""


@dataclass(frozen=True)
class Run:
    """What a log says, the last word on each step counting."""

    name: str
    """How the user named it."""
    folder: Path
    """Where the log lies."""
    steps: dict[int, LoggedStep]
    contradicted: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Steps logged more than once under one recipe, with different digests: the first two."""
    broken: list[int] = field(default_factory=list)
    """Steps whose chain does not follow from the steps before: the log was edited."""
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``settings`` and ``identity`` of each recipe that lies beside the log."""

    def cursors(self) -> dict[tuple[str, int], dict[int, str]]:
        """For each recipe and lane the logged segments with their cursors, as JSON.

        Raises:
            AuditError: a line cannot be read.
        """
        found: dict[tuple[str, int], dict[int, str]] = {}
        path = self.folder / CURSORS
        for line in read_lines(path):
            try:
                of_lane = found.setdefault((line["recipe"], line["lane"]), {})
                of_lane[line["segment"]] = json.dumps(line["cursor"])
            except (KeyError, TypeError) as error:
                raise AuditError(f"{path}: not a cursor: {str(line)[:80]}") from error
        return found


def read_run(path: str) -> Run:
    """The run whose folder, audit folder or log file ``path`` is.

    Raises:
        AuditError: there is no log, or a line of it cannot be read.
    """
    log = _find_log(Path(path))
    steps: dict[int, LoggedStep] = {}
    digests: dict[tuple[str, int, int], str] = {}
    contradicted: dict[int, tuple[str, str]] = {}
    recipes = _read_recipes(log.parent)
    chains: dict[str, dict[int, str]] = {}
    broken: set[int] = set()
    for line in read_lines(log):
        try:
            sums = line.get("sums")
            now = LoggedStep(
                step=line["step"],
                sequences=line["sequences"],
                batch=None,
                sha256=line["sha256"],
                sums=None if sums is None else (int(sums[:16], 16), int(sums[16:], 16)),
                dp_degree=line["dp_degree"],
                recipe=line["recipe"],
            )
            follows = _chain_follows(line, chains.setdefault(now.recipe, {}), recipes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AuditError(f"{log}: not a step of an audit log: {str(line)[:80]}") from error
        if not follows:
            broken.add(now.step)
        before = digests.setdefault((now.recipe, now.step, now.sequences), now.sha256)
        if before != now.sha256:
            contradicted.setdefault(now.step, (before, now.sha256))
        old = steps.get(now.step)
        if old is not None and (old.recipe, old.sequences) != (now.recipe, now.sequences):
            # Resumed from here with another batch size or recipe: what was logged of later steps
            # belongs to a past that this run gave up.
            steps = {s: logged for s, logged in steps.items() if s < now.step}
        steps[now.step] = now
    if not steps:
        raise AuditError(f"{log}: no step is logged")
    return Run(path, log.parent, _with_batch(steps), contradicted, sorted(broken), recipes)


def _find_log(path: Path) -> Path:
    if path.is_file():
        return path
    places = [path / BATCHES, path / "audit" / BATCHES, *sorted(path.glob(f"*/{BATCHES}"))]
    found = [p for p in dict.fromkeys(places) if p.is_file()]
    if not found:
        what = "holds no audit log" if path.is_dir() else "no such file or folder"
        raise AuditError(
            f"{path}: {what}; give a run's folder, its audit folder, or a file {BATCHES}"
        )
    if len(found) > 1 and found[0].parent != path and found[0].parent.name != "audit":
        raise AuditError(f"{path}: several audit logs ({', '.join(map(str, found))}); give one")
    return found[0]


def _read_recipes(folder: Path) -> dict[str, dict[str, Any]]:
    recipes = {}
    for path in sorted(folder.glob("recipe-*.json")):
        try:
            recipes[path.stem.removeprefix("recipe-")] = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise AuditError(f"{path}: not JSON ({error})") from error
    return recipes


def _chain_follows(
    line: dict[str, Any], chain: dict[int, str], recipes: dict[str, dict[str, Any]]
) -> bool:
    """Whether a line's chain follows from the line of the step before; notes it in ``chain``."""
    before = chain.get(line["step"] - 1)
    if before is None and line["recipe"] in recipes:
        fingerprint = digest_json(recipes[line["recipe"]].get("identity"))
        before = hashlib.sha256(fingerprint.encode()).hexdigest()
    chain[line["step"]] = line["chain"]
    if before is None:
        return True  # a log that lost its recipe: nothing to follow from
    link = hashlib.sha256(bytes.fromhex(before) + bytes.fromhex(line["sha256"])).hexdigest()
    return link == line["chain"]


def _with_batch(steps: dict[int, LoggedStep]) -> dict[int, LoggedStep]:
    batches: dict[int, int | None] = {}
    for step, logged in steps.items():
        if step == 1:
            batches[step] = logged.sequences
        elif step - 1 in steps:
            batches[step] = logged.sequences - steps[step - 1].sequences
        elif step + 1 in steps:  # the log begins here; the batch size changes at restarts only
            batches[step] = steps[step + 1].sequences - logged.sequences
        else:
            whole = logged.sequences % step == 0
            batches[step] = logged.sequences // step if whole else None
    return {
        step: dataclasses.replace(logged, batch=batches[step])
        for step, logged in sorted(steps.items())
    }
