"""The subcommands of ``torchtitan-zephon``: each prints its answer and returns the exit status."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan_zephon.audit import barcode
from torchtitan_zephon.audit.compare import Comparison, compare, contradictions
from torchtitan_zephon.audit.runs import Run, read_run

SHORT = 160
"""Characters of a piece's text that are shown without ``--full``."""


class UsageError(ValueError):
    """Arguments that do not fit together."""


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _barcode(tracks: list[barcode.Track]) -> str:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return barcode.terminal(
        tracks, columns=shutil.get_terminal_size((100, 24)).columns, color=color
    )


# -- compare -------------------------------------------------------------------------------------


def compare_command(arguments: argparse.Namespace) -> int:
    """Where runs leave the first one; 1 if any does, or a log contradicts itself."""
    if len(arguments.runs) < 2:
        raise UsageError("compare needs two runs or more")
    runs = [read_run(path) for path in arguments.runs]
    results = [
        compare(
            runs[0],
            run,
            any_recipe=arguments.any_recipe,
            rebuild=not arguments.no_rebuild,
        )
        for run in runs[1:]
    ]
    faults = [line for run in runs for line in contradictions(run)]
    tracks = [_track(runs[0], [])] + [_track(r.run, r.differing) for r in results]
    if arguments.png:
        barcode.png(tracks, Path(arguments.png))
    same = all(r.same for r in results) and not faults
    if arguments.json:
        _print_json({"same": same, "faults": faults, "runs": [r.to_json() for r in results]})
        return 0 if same else 1
    print(_barcode(tracks) + "\n")
    for result in results:
        print(_told(result))
    for line in faults:
        print(line)
    return 0 if same else 1


def _track(run: Run, differing: list[int]) -> barcode.Track:
    digests = {step: logged.sha256 for step, logged in run.steps.items()}
    return barcode.Track(run.name, digests, frozenset(differing))


def _told(result: Comparison) -> str:
    count = len(result.compared)
    only = [
        f"{len(run.steps) - count} only in {run.name}"
        for run in (result.first, result.run)
        if len(run.steps) > count
    ]
    more = f" ({', '.join(only)})" if only else ""
    if result.same:
        return f"{result.run.name}: the same in all {count} steps that both have{more}"
    lines = [
        f"{result.run.name}: DIFFERENT from step {result.differing[0]} on, "
        f"{len(result.differing)} of {count} steps{more}"
    ]
    lines += [f"  step {f.step}: {f.text}" for f in result.findings]
    if result.what:
        lines.append(f"  what differs: {result.what}")
    return "\n".join(lines + [f"  {note}" for note in result.notes])


# -- show ----------------------------------------------------------------------------------------


def show_command(arguments: argparse.Namespace) -> int:
    """A past step, or the steps that contain a text; raises where it is not the logged one."""
    from torchtitan_zephon.audit.replay import Replay

    if (arguments.step is None) == (arguments.grep is None):
        raise UsageError("show needs either --step N or --grep TEXT")
    data = dict(pair.partition("=")[::2] for pair in arguments.data)
    replay = Replay(read_run(arguments.folder), data, arguments.tokenizer)
    if arguments.grep is not None:
        return _grep(arguments, replay)
    began = time.monotonic()
    step = arguments.step
    rebuilt = replay.checked_step(step)
    took = time.monotonic() - began
    logged, sequences = rebuilt.logged, rebuilt.sequences
    wanted = range(len(sequences))
    if arguments.sequence is not None:
        if arguments.sequence not in wanted:
            raise UsageError(
                f"--sequence {arguments.sequence}: step {step} has sequences 0 to {wanted[-1]}"
            )
        wanted = [arguments.sequence]
    changes = replay.changes(step)
    described = [_described(replay, rebuilt, i, arguments.full) for i in wanted]
    if arguments.json:
        _print_json(
            {
                "run": arguments.folder,
                "step": step,
                "sha256": rebuilt.sha256,
                "matches_log": True,
                "dp_degree": logged.dp_degree,
                "recipe": logged.recipe,
                "changed_since": changes,
                "sequences": described,
            }
        )
        return 0
    print(
        f"step {step} of {arguments.folder}: {len(sequences)} sequences of "
        f"{len(sequences[0].inputs)} tokens on {logged.dp_degree} ranks, recipe {logged.recipe}"
    )
    print(f"made again in {took:.1f} s; SHA-256 {rebuilt.sha256[:16]}, as logged")
    if changes:
        print(f"this step is as it was, though the recipe is not: {'; '.join(changes)}")
    for one in described:
        print(
            f"\nsequence {one['sequence']}   rank {one['rank']}   lane {one['lane']}, number "
            f"{one['number']}"
        )
        for piece in one["pieces"]:
            end = piece["column"] + piece["stop"] - piece["start"]
            print(
                f"  {piece['column']:>6}:{end:<6} {piece['dataset']}  {piece['where']}  "
                f"tokens {piece['start']}:{piece['stop']} of {piece['tokens']}, epoch "
                f"{piece['epoch']}"
            )
            print(f"         {_quoted(piece['text'])}")
        if one["padding"]:
            size = len(sequences[0].inputs)
            print(f"  {size - one['padding']:>6}:{size:<6} padding")
    return 0


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _described(replay: Any, rebuilt: Any, index: int, full: bool) -> dict[str, Any]:
    step, sequence = rebuilt.logged.step, rebuilt.sequences[index]
    pieces = replay.pieces(step, sequence)
    return {
        "sequence": index,
        "rank": rebuilt.rank_of(index),
        "lane": sequence.lane,
        "number": sequence.number,
        "sha256": sequence.digest.hex(),
        "pieces": [_described_piece(replay, step, sequence, piece, full) for piece in pieces],
        "padding": len(sequence.inputs) - sum(p.length for p in pieces),
    }


def _described_piece(
    replay: Any, step: int, sequence: Any, piece: Any, full: bool
) -> dict[str, Any]:
    origin = replay.origin(step, sequence, piece)
    kind = "row" if origin.byte is None else "line"
    return {
        "column": piece.column,
        "dataset": piece.dataset,
        "where": str(origin),
        "shard": origin.shard,
        kind: origin.record,
        "epoch": origin.epoch,
        "start": piece.reference.start,
        "stop": piece.reference.stop,
        "tokens": origin.tokens,
        "text": piece.text if full else _shortened(piece.text),
    }


def _shortened(text: str) -> str:
    half = SHORT // 2
    return text if len(text) <= SHORT else f"{text[:half]} ... {text[-half:]}"


def _grep(arguments: argparse.Namespace, replay: Any) -> int:
    text = arguments.grep
    if not text:
        raise UsageError("--grep: the text must not be empty")
    steps = _step_range(arguments.steps, replay.run)
    hits = []
    for rebuilt, index, piece in replay.search(steps, text):
        step, sequence = rebuilt.logged.step, rebuilt.sequences[index]
        hit = _described_piece(replay, step, sequence, piece, arguments.full)
        at = piece.text.index(text)
        around = piece.text[max(0, at - 60) : at + len(text) + 60]
        hit = {
            "step": step,
            "sequence": index,
            "rank": rebuilt.rank_of(index),
            **hit,
            "text": piece.text if arguments.full else around,
        }
        hits.append(hit)
        if not arguments.json:
            print(
                f"step {step}  sequence {index}  rank {hit['rank']}  {piece.dataset}  "
                f"{hit['where']}\n         {_quoted(hit['text'])}"
            )
    if arguments.json:
        _print_json({"run": arguments.folder, "grep": text, "hits": hits})
    else:
        where = f"steps {steps[0]} to {steps[-1]}"
        count = len({h["step"] for h in hits})
        print(f"{len(hits)} pieces in {count} of {where} contain {text!r}")
    return 0


def _step_range(text: str | None, run: Run) -> range | list[int]:
    known = list(run.steps)
    if text is None:
        return known
    first, colon, last = text.partition(":")
    try:
        lo, hi = int(first or known[0]), int(last or known[-1]) if colon else int(first)
    except ValueError:
        raise UsageError(f"--steps {text}: expected A:B, two step numbers") from None
    steps = [s for s in known if lo <= s <= hi]
    if not steps:
        raise UsageError(f"--steps {text}: the log has steps {known[0]} to {known[-1]}")
    return steps


# -- simulate ------------------------------------------------------------------------------------


def simulate_command(arguments: argparse.Namespace) -> int:
    """Every rank of resumes against a reference run; 1 if any is given other data."""
    try:
        resume = [int(n) for n in arguments.resume.split(",") if n.strip()]
    except ValueError:
        raise UsageError(f"--resume {arguments.resume}: expected numbers of ranks, 8,32") from None
    pipeline, batch = _configured(arguments.config, arguments.flags)
    from torchtitan_zephon.audit.simulate import simulate

    began = time.monotonic()
    say = print if sys.stderr.isatty() else lambda *_, **__: None
    arms = simulate(
        pipeline,
        batch=batch,
        ranks=arguments.dp,
        resume=resume,
        at=arguments.at,
        steps=arguments.steps,
        sample_ranks=arguments.sample_ranks,
        honest=arguments.honest,
        on_arm=lambda name: say(f"{name} ...", file=sys.stderr),
    )
    took = time.monotonic() - began
    names = [f"{arms[0].ranks} ranks"]
    names += [f"{arguments.at} -> {arm.ranks} ranks" for arm in arms[1:]]
    tracks = [
        barcode.Track(name, arm.digests, frozenset(arm.differing))
        for name, arm in zip(names, arms, strict=True)
    ]
    if arguments.png:
        barcode.png(tracks, Path(arguments.png))
    same = not any(arm.differing for arm in arms)
    if arguments.json:
        _print_json(
            {
                "config": arguments.config,
                "global_batch_size": batch,
                "lanes": pipeline.lanes,
                "fingerprint": pipeline.fingerprint,
                "same": same,
                "seconds": round(took, 3),
                "arms": [arm.to_json() for arm in arms],
            }
        )
        return 0 if same else 1
    print(
        f"global batch {batch}, {pipeline.lanes} lanes, segments of {pipeline.segment_rows} "
        f"sequences, recipe {pipeline.fingerprint[:12]}; {took:.1f} s\n"
    )
    print(f"{'arm':<24}{'ranks':>7}{'looked at':>11}{'steps':>13}  global batches")
    for number, arm in enumerate(arms):
        name = "reference" if number == 0 else f"resumed at {arguments.at}"
        steps = f"{arm.first_step}-{arm.first_step + len(arm.digests) - 1}"
        told = "" if number == 0 else _arm_told(arm)
        print(f"{name:<24}{arm.ranks:>7}{len(arm.looked_at):>11}{steps:>13}  {told}".rstrip())
    print("\n" + _barcode(tracks))
    return 0 if same else 1


def _arm_told(arm: Any) -> str:
    if not arm.differing:
        return "the same"
    return f"DIFFERENT from step {arm.differing[0]} on, there on ranks {arm.wrong_ranks[:8]}"


def _configured(path: str, flags: list[str]) -> tuple[Any, int]:
    """The pipeline and the global batch size of a training config."""
    from torchtitan_zephon.pipeline import Pipeline
    from torchtitan_zephon.recipe import auto_lanes
    from torchtitan_zephon.titan.config import load_config
    from torchtitan_zephon.titan.cpu import use_cpu_if_no_accelerator
    from torchtitan_zephon.titan.loader import ZephonDataLoader

    use_cpu_if_no_accelerator()
    config = load_config(["--config_file", path, *flags])
    loader = config.dataloader
    if not isinstance(loader, ZephonDataLoader.Config) or loader.recipe is None:
        raise UsageError(f"{path}: no [zephon] section, so no recipe to simulate")
    recipe = loader.recipe
    if recipe.lanes == "auto":
        recipe = dataclasses.replace(recipe, lanes=auto_lanes(loader.global_batch_size))
    return Pipeline(recipe), loader.global_batch_size


# -- checkpoint ----------------------------------------------------------------------------------


def checkpoint_command(arguments: argparse.Namespace) -> int:
    """A saved state in words, or what differs in two; 1 on a fault or a difference."""
    from torchtitan_zephon.audit.inspect import read_state, state_differences

    state = read_state(arguments.folder)
    if arguments.diff is not None:
        changes = list(state_differences(state, read_state(arguments.diff)))
        if arguments.json:
            _print_json({"same": not changes, "differences": changes})
        else:
            print("\n".join(changes) if changes else "the same")
        return 1 if changes else 0
    if arguments.json:
        _print_json(state.to_json())
        return 1 if state.faults else 0
    meta = state.meta
    print(f"{state.path}")
    print(f"  step         {meta['steps']}")
    print(f"  sequences    {meta['sequences']}")
    print(f"  lanes        {meta['lanes']}, segments of {meta['segment_rows']} sequences")
    print(f"  fingerprint  {meta['fingerprint']}")
    print("\nrecipe")
    for line in _flat(meta["recipe"]):
        print(f"  {line}")
    drawn = state.tokens()
    total = sum(drawn.values())
    print("\ntokens drawn up to the lanes' segments")
    for name, count in drawn.items():
        print(f"  {name:<20} {count:>15}  {100 * count / max(1, total):6.2f} %")
    cursors = state.cursors.values()
    waiting = sum(r.stop - r.start for c in cursors for row in c.unfinished for r in row)
    print(
        f"  {sum(c.trained for c in cursors)} in rows, {waiting} not yet, "
        f"{sum(c.dropped for c in cursors)} dropped; "
        f"{sum(c.padding for c in cursors)} places padded"
    )
    print("\nlane  segment  unfinished  position (chunk, block, row) of each dataset")
    for lane, cursor in sorted(state.cursors.items()):
        left = sum(r.stop - r.start for row in cursor.unfinished for r in row)
        places = "  ".join(f"{name} {at[0]}, {at[1]}, {at[2]}" for name, at in cursor.positions)
        print(f"{lane:>4}  {cursor.segment:>7}  {left:>10}  {places}")
    for fault in state.faults:
        print(f"FAULT: {fault}")
    return 1 if state.faults else 0


def _flat(value: Any, where: str = "") -> list[str]:
    if isinstance(value, dict):
        return [
            line for k, v in value.items() for line in _flat(v, f"{where}.{k}" if where else str(k))
        ]
    return [f"{where} = {json.dumps(value, ensure_ascii=False)}"]


# -- check ---------------------------------------------------------------------------------------


def check_command(arguments: argparse.Namespace) -> int:
    """Whether the recipe's functions are deterministic; 1 if one is not."""
    from torchtitan_zephon.api import Pipeline

    pipeline = Pipeline.from_toml(arguments.config)
    faults = pipeline.check(arguments.chunks)
    count = len(pipeline.open().functions)
    if arguments.json:
        _print_json({"functions": count, "faults": faults})
    else:
        done = f"{count} functions ran twice on {arguments.chunks} chunks of each dataset"
        print("\n".join(faults) if faults else f"{done}: the same records each time")
    return 1 if faults else 0
