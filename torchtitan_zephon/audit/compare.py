"""Comparing runs by their audit logs: where each leaves the first one, and what is different there.

Most is proven by the logs alone, from the ``sums`` of each step. What the values of a difference
are takes the sequences, so the step is made again where the recipe's data can still be read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from torchtitan_zephon.audit.log import PRIME, AuditError, sequence_value
from torchtitan_zephon.audit.runs import LoggedStep, Run
from torchtitan_zephon.recipe import differences
from torchtitan_zephon.steps import sequence_digest

Kind = Literal["batch size", "order only", "moved", "one sequence", "sequences", "unknown"]

_SWAPS_UP_TO = 1024  # sequences of a step up to which every pair of them is tried
_GUESSES = 1 << 19  # altered sequences tried when looking for what was altered
_GUESS_BYTES = 1 << 31  # of sequences hashed in doing so


class OtherRecipeError(AuditError):
    """Two runs of different recipes, which have no reason to agree."""


@dataclass(frozen=True)
class Finding:
    """What is different in one step, as far as the logs alone tell."""

    step: int
    kind: Kind
    text: str
    sequence: int | None = None
    """The place in the step of the only sequence that differs."""
    other_step: int | None = None
    """For ``moved``: the step that the sequence changed places with."""


@dataclass
class Comparison:
    """One run against the first."""

    first: Run
    run: Run
    compared: list[int]
    """Steps that both have."""
    differing: list[int]
    findings: list[Finding]
    """For the first differing step, and the steps that it exchanged sequences with."""
    what: str | None = None
    """``tokens``, ``labels``, ``positions`` or ``order only``, where it is known."""
    notes: list[str] = field(default_factory=list)
    """What was found out by making the step again."""

    @property
    def same(self) -> bool:
        """Whether no step differs."""
        return not self.differing

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "first": self.first.name,
            "run": self.run.name,
            "same": self.same,
            "steps_compared": len(self.compared),
            "steps_only_in_first": len(self.first.steps) - len(self.compared),
            "steps_only_in_run": len(self.run.steps) - len(self.compared),
            "differing_steps": self.differing,
            "first_difference": self.differing[0] if self.differing else None,
            "what": self.what,
            "findings": [
                {
                    "step": f.step,
                    "kind": f.kind,
                    "text": f.text,
                    "sequence": f.sequence,
                    "other_step": f.other_step,
                }
                for f in self.findings
            ],
            "notes": self.notes,
        }


def compare(first: Run, run: Run, *, any_recipe: bool = False, rebuild: bool = True) -> Comparison:
    """Find where ``run`` leaves ``first``, and what is different there.

    Args:
        any_recipe: compare runs of different recipes too.
        rebuild: make the first differing step again from both runs' recipes, if that is possible.

    Raises:
        OtherRecipeError: naming the fields in which the recipes differ.
        AuditError: the logs have no step in common.
    """
    if not any_recipe:
        _check_recipes(first, run)
    compared = [s for s in first.steps if s in run.steps]
    if not compared:
        raise AuditError(f"{run.name} and {first.name} have no step in common")
    differing = [s for s in compared if first.steps[s].sha256 != run.steps[s].sha256]
    result = Comparison(first, run, compared, differing, [])
    if differing:
        result.findings = list(_findings(first, run, differing))
        if result.findings[0].kind in ("order only", "moved"):
            result.what = result.findings[0].kind
        if rebuild:
            _explain(result)
    return result


def contradictions(run: Run) -> list[str]:
    """What is wrong with a run's log in itself: a line for each step."""
    lines = [
        f"{run.name}: step {step} was logged twice with different data: {a[:16]}, then {b[:16]}"
        for step, (a, b) in run.contradicted.items()
    ]
    if run.broken:
        lines.append(
            f"{run.name}: the chain breaks at step {run.broken[0]}: a line was edited or taken out"
        )
    return lines


def _check_recipes(first: Run, run: Run) -> None:
    used = [list(dict.fromkeys(s.recipe for s in r.steps.values())) for r in (first, run)]
    if set(used[0]) == set(used[1]):
        return
    old, new = (next((n for n in a if n not in b), a[-1]) for a, b in (used, used[::-1]))
    described = [r.recipes.get(n) for r, n in ((first, old), (run, new))]
    if None in described:
        missing = (first.folder, old) if described[0] is None else (run.folder, new)
        what = f"which fields is not known, for {missing[0]}/recipe-{missing[1]}.json is not there"
    else:
        what = "; ".join(differences(*(d["identity"] for d in described if d)))
    raise OtherRecipeError(
        f"{run.name} is of another recipe than {first.name}: {what} (--any-recipe compares them "
        "all the same)"
    )


# -- from the logs alone -------------------------------------------------------------------------


def _findings(first: Run, run: Run, differing: list[int]) -> Iterator[Finding]:
    step = differing[0]
    a, b = first.steps[step], run.steps[step]
    if (a.sequences, a.batch) != (b.sequences, b.batch):
        yield Finding(
            step,
            "batch size",
            f"other sequences of the run: {_range(a)} in {first.name}, {_range(b)} in {run.name}",
        )
        return
    delta = _delta(a, b)
    if delta is None:
        yield Finding(step, "unknown", "the logs have no sums, so only that it differs is known")
        return
    if delta[0] == 0:
        yield Finding(step, "order only", "the same sequences in another order")
        return
    place = _place(delta, a.batch)
    for other in differing[1:]:
        deltas = _delta(first.steps[other], run.steps[other])
        if deltas is None or (delta[0] + deltas[0]) % PRIME != 0:
            continue
        there = _place(deltas, first.steps[other].batch)
        if place is None or there is None:
            text = f"steps {step} and {other} exchanged sequences; between them they have the same"
            yield Finding(step, "moved", text, None, other)
            return
        text = f"sequence {place} of step {step} and {there} of step {other} changed places"
        yield Finding(step, "moved", text, place, other)
        yield Finding(other, "moved", text, there, step)
        return
    if place is not None:
        owner = place * b.dp_degree // b.batch if b.batch else 0
        yield Finding(
            step,
            "one sequence",
            f"sequence {place} of {b.batch} differs, all others are the same; in {run.name} it was "
            f"given to rank {owner} of {b.dp_degree}",
            place,
        )
        return
    yield Finding(step, "sequences", "several sequences differ")


def _range(logged: LoggedStep) -> str:
    if logged.batch is None:
        return f"up to {logged.sequences - 1}"
    return f"{logged.sequences - logged.batch} to {logged.sequences - 1}"


def _delta(a: LoggedStep, b: LoggedStep) -> tuple[int, int] | None:
    if a.sums is None or b.sums is None:
        return None
    return (b.sums[0] - a.sums[0]) % PRIME, (b.sums[1] - a.sums[1]) % PRIME


def _place(delta: tuple[int, int], batch: int | None) -> int | None:
    """The only place that differs, from 0; None if there are several."""
    # By chance several differences look like one with probability batch / 2**61.
    place = delta[1] * pow(delta[0], -1, PRIME) % PRIME
    return place - 1 if batch is not None and 1 <= place <= batch else None


# -- by making the step again --------------------------------------------------------------------


def _explain(result: Comparison) -> None:
    # Not above: reading two logs does not take a tokenizer.
    from torchtitan_zephon.audit.replay import RebuiltStep, Replay

    finding = result.findings[0]
    if finding.kind == "batch size":
        return
    made: list[RebuiltStep | None] = []
    for run in (result.first, result.run):
        replay = Replay(run)
        try:
            rebuilt = replay.step(finding.step)
        except AuditError as error:
            result.notes.append(f"not made again: {error}")
            made.append(None)
            continue
        made.append(rebuilt)
        # What a recipe gives need not be what a run got: that is how a fault of memory shows.
        told = "as logged"
        if not rebuilt.matches:
            changes = "; ".join(replay.changes(finding.step))
            told = f"NOT as logged{f'; changed since the run: {changes}' if changes else ''}"
        result.notes.append(
            f"{run.name}: step {finding.step}, made again from its recipe, is {told}"
        )
    a, b = made
    if a is not None and b is not None and a.matches and b.matches:
        result.what = _what_differs(a, b, result.notes)
        return
    for good, bad, run in ((a, b, result.run), (b, a, result.first)):
        if good is None or not good.matches or (bad is not None and bad.matches):
            continue
        if bad is not None:
            result.notes.append(
                f"so {run.name} was given other data than its recipe and cursors say: look for a "
                f"fault of memory, of the code, or of the data at the time"
            )
        what = _what_was_altered(good, run.steps[finding.step], finding, result.notes)
        result.what = result.what or what
        return


def _what_differs(a: Any, b: Any, notes: list[str]) -> str:
    """Two batches that are both as logged, compared sequence by sequence."""
    ours, theirs = [[s.digest for s in step.sequences] for step in (a, b)]
    other = [i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y]
    notes.append(f"{len(other)} of {len(ours)} sequences differ, the first is sequence {other[0]}")
    if sorted(ours) == sorted(theirs):
        return "order only"
    for name, values in (("tokens", "inputs"), ("labels", "labels"), ("positions", "positions")):
        for i in other:
            x, y = getattr(a.sequences[i], values), getattr(b.sequences[i], values)
            if len(x) != len(y):
                notes.append(f"sequence {i} has {len(x)} places in one and {len(y)} in the other")
                return name
            at = np.flatnonzero(x != y)
            if len(at):
                notes.append(
                    f"sequence {i}: {len(at)} of {len(x)} {name} differ, the first at place "
                    f"{at[0]}: {x[at[0]]} and {y[at[0]]}"
                )
                return name
    return "order only"


def _what_was_altered(
    good: Any, logged: LoggedStep, finding: Finding, notes: list[str]
) -> str | None:
    """What makes of a sound batch the one that was logged, if it is something small."""
    if logged.sums is None:
        return None
    delta = (logged.sums[0] - good.sums[0]) % PRIME, (logged.sums[1] - good.sums[1]) % PRIME
    digests = [s.digest for s in good.sequences]
    if delta[0] == 0:
        for i, j in _pairs(min(len(digests), _SWAPS_UP_TO)):
            x, y = sequence_value(digests[i]), sequence_value(digests[j])
            if (j - i) * (x - y) % PRIME == delta[1]:
                notes.append(f"sequences {i} and {j} of the step changed places")
                break
        return "order only"
    if finding.kind != "one sequence" or finding.sequence is None:
        return None
    sequence = good.sequences[finding.sequence]
    wanted = (sequence_value(sequence.digest) + delta[0]) % PRIME
    for what, text, digest in _guesses(sequence):
        if sequence_value(digest()) == wanted:
            notes.append(f"sequence {finding.sequence}: {text}; everything else in it is the same")
            return what
    notes.append(f"sequence {finding.sequence}: more than one token of it differs")
    return None


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for j in range(count) for i in range(j))


def _guesses(sequence: Any) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Ways in which one token may have been altered: all other ids if that is cheap, else one bit.

    Yields ``tokens`` or ``labels``, the alteration in words, and what gives its digest.
    """
    inputs, labels = sequence.inputs, sequence.labels
    highest = int(max(inputs.max(), labels.max()))
    top = 1 << highest.bit_length()
    ways = min(_GUESSES, _GUESS_BYTES // (12 * len(inputs))) // (3 * len(inputs))
    bits = [1 << b for b in range(top.bit_length())]
    changes = list(range(1, top)) if top <= ways else bits[: max(ways, 0)]

    def altered(at: int, value: int, both: bool, only_label: bool) -> Callable[[], bytes]:
        def digest() -> bytes:
            x, y = inputs.copy(), labels.copy()
            if not only_label:
                x[at] = value
            if only_label or both:
                y[at - (0 if only_label else 1)] = value
            return sequence_digest(x, y, sequence.positions)

        return digest

    for change in changes:
        for at in range(len(inputs)):
            x, y = int(inputs[at]), int(labels[at])
            text = f"place {at} has token {x ^ change} where the recipe gives {x}"
            yield "tokens", text, altered(at, x ^ change, False, False)
            if at and labels[at - 1] == x:
                text = f"{text}, as input and as label"
                yield "tokens", text, altered(at, x ^ change, True, False)
            if y >= 0:
                text = f"place {at} has label {y ^ change} where the recipe gives {y}"
                yield "labels", text, altered(at, y ^ change, False, True)
