"""Experiment 1: a run is stopped, and resumed on other numbers of ranks; is it the same run?

    python scripts/elastic_resume_experiment.py                      # CPU: 4 ranks, then 1, 2, 8
    python scripts/elastic_resume_experiment.py --dp 16 --resume 8,32,64 --checkpoint 150 \
        --launcher './on_our_cluster.sh {ranks}' -- --model.flavor 1B

Once with TorchTitan's stock loader, which refuses to resume on another number of ranks and is made
to by leaving its state out, and once with this project's. Writes OUT/steps.csv (loss and SHA-256 of
every step of every run), OUT/elastic_resume.png and OUT/report.html.
"""

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiment import corpus, report
from experiment.elastic_resume import LoaderResult, draw, summarize
from experiment.runs import (
    LOADERS,
    ROOT,
    Arm,
    add_arguments,
    batch_digest,
    global_batch,
    read_batches,
    read_csv,
    read_losses,
    run_all,
    write_config,
    write_csv,
)

SEED = 1
TITLE = "Elastic resume: is a run that comes back on another number of ranks the same run?"


def make_arms(args: argparse.Namespace) -> tuple[list[Arm], list[Arm]]:
    """The references, which save the checkpoint, and the runs resumed from it."""
    config, step = f"{args.out}/train.toml", args.checkpoint
    references, resumed = [], []
    for loader in LOADERS:
        save = ("--checkpoint.enable", "--checkpoint.interval", str(step))
        name = f"{loader}/reference"
        references.append(Arm(name, loader, args.dp, config, 1, (*save, *args.flags)))
        # What a user does about the stock loader's refusal: leave its state out.
        drop = ("--checkpoint.exclude_from_loading", "dataloader") if loader == "stock" else ()
        for ranks in args.resume:
            arm = f"{loader}/resumed-on-{ranks}"
            saved = f"checkpoint/step-{step}"
            copy = ((f"{args.out}/{name}/{saved}", f"{args.out}/{arm}/{saved}"),)
            flags = (*save, *drop, *args.flags)
            resumed.append(Arm(arm, loader, ranks, config, step + 1, flags, copy))
    return references, resumed


def train(args: argparse.Namespace) -> None:
    """Run all arms; writes steps.csv and runs.json."""
    out = ROOT / args.out
    data = f"{args.out}/data"
    batch = args.global_batch or global_batch([args.dp, *args.resume], at_least=24)
    corpus.prepare(ROOT / data, SEED, args.vocab_size)
    write_config(
        out / "train.toml",
        data=data,
        layers=args.layers,
        vocab_size=args.vocab_size,
        batch=batch,
        local_batch=batch // max(args.dp, *args.resume),
        seq_len=args.seq_len,
        steps=args.steps,
        lr=args.lr,
        seed=SEED,
        validate="false",
        buffer=10 * batch,
    )
    references, resumed = make_arms(args)
    seconds = run_all(references, args.out, args.jobs, args.launcher)
    seconds |= run_all(resumed, args.out, args.jobs, args.launcher)
    refusal = refusal_of_stock_loader(resumed, args)
    write_csv(out / "steps.csv", collect(references, resumed, batch, args.checkpoint, out))
    meta = {
        "checkpoint": args.checkpoint,
        "refusal": refusal,
        "command": shlex.join(["python", f"scripts/{Path(__file__).name}", *sys.argv[1:]]),
        "commands": [shlex.join(arm.command(args.out)) for arm in [*references, *resumed]],
        "seconds": {name: round(s) for name, s in seconds.items()},
        "versions": report.versions(),
    }
    (out / "runs.json").write_text(json.dumps(meta, indent=2) + "\n")


def collect(
    references: list[Arm], resumed: list[Arm], batch: int, checkpoint: int, out: Path
) -> list[dict[str, Any]]:
    """The rows of steps.csv, from what the runs recorded."""
    rows: list[dict[str, Any]] = []
    before: dict[str, set[str]] = {}  # what each loader's model was trained on by the checkpoint
    for arm in [*references, *resumed]:
        record = out / arm.name / "record"
        losses = read_losses(record, "train")
        batches = read_batches(record, batch=batch, ranks=arm.ranks, first=arm.first)
        digests = {step: batch_digest(b) for step, b in batches.items()}
        check_against_audit(arm, digests, out)
        if arm in references:
            before[arm.loader] = {r for s, b in batches.items() if s <= checkpoint for r in b}
        rows += [
            {
                "loader": arm.loader,
                "run": arm.name.rpartition("/")[2],
                "ranks": arm.ranks,
                "step": step,
                "loss": losses[step],
                "sha256": digests[step],
                "rows": batch,
                "rows_seen": sum(r in before[arm.loader] for r in batches[step]),
            }
            for step in sorted(losses)
        ]
    return rows


def refusal_of_stock_loader(resumed: list[Arm], args: argparse.Namespace) -> str:
    """What TorchTitan says when the stock loader's state is not left out; empty if it resumes."""
    arm = next(arm for arm in resumed if arm.loader == "stock")
    flags = [f for f in arm.flags if f not in ("--checkpoint.exclude_from_loading", "dataloader")]
    name = f"{arm.name}-as-it-is"
    copy = tuple((source, target.replace(arm.name, name)) for source, target in arm.copy)
    as_it_is = replace(arm, name=name, flags=tuple(flags), copy=copy)
    try:
        run_all([as_it_is], args.out, 1, args.launcher)
    except RuntimeError:
        log = (ROOT / args.out / name / "log.txt").read_text(errors="replace")
        error = re.search(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", log, flags=re.MULTILINE)
        return error[0] if error else "it ends without a message"
    return ""


def check_against_audit(arm: Arm, digests: dict[int, str], out: Path) -> None:
    """Compare what the experiment recorded with what this loader's audit log says.

    Raises:
        RuntimeError: they differ.
    """
    log = out / arm.name / "audit/global_batches.jsonl"
    if arm.loader == "zephon":
        logged = {r["step"]: r["sha256"] for r in map(json.loads, log.read_text().splitlines())}
        if any(logged.get(step) != digest for step, digest in digests.items()):
            raise RuntimeError(f"{log}: not the digests of what the trainer was given")


def write_report(out: Path) -> None:
    """The figure and the page, from the files that `train` wrote."""
    meta = json.loads((out / "runs.json").read_text())
    results = summarize(read_csv(out / "steps.csv"), meta["checkpoint"])
    draw(results, meta["checkpoint"], out / "elastic_resume.png")
    (out / "report.html").write_text(make_page(results, meta, out), encoding="utf-8")
    for result in results:
        for run in result.resumed:
            print(f"{result.loader}, {run.title}: {run.verdict(plain=True)}")
    print(f"report: {out / 'report.html'}")


def make_page(results: list[LoaderResult], meta: dict[str, Any], out: Path) -> str:
    """The HTML report."""
    rows = []
    for result in results:
        for run in result.resumed:
            gap = f"{run.largest_gap:#.2g}"
            again = f"{run.seen_again} of {run.rows}"
            rows.append([LOADERS[result.loader], run.title, run.verdict(), again, gap, run.final])
    reference = results[0].reference
    zephon = next(r for r in results if r.loader == "zephon")
    same = sum(run.equal for run in zephon.resumed)
    count = sum(run.steps for run in zephon.resumed)
    lead = (
        f"A small Llama was trained on {reference.ranks} ranks and a checkpoint of step "
        f"{meta['checkpoint']} was resumed on {report.listed([r.ranks for r in zephon.resumed])} "
        f"ranks. With this loader {same} of {count} global batches after the checkpoint are the "
        "reference's, byte for byte. With TorchTitan's stock loader "
        f"{sum(r.equal for r in results[0].resumed)} of "
        f"{sum(r.steps for r in results[0].resumed)} are."
    )
    refusal = (
        f'refuses to resume on another number of ranks: "{meta["refusal"].rstrip(".")}"'
        if meta["refusal"]
        else "resumed when it was tried, against expectation"
    )
    parts = [
        report.figure(
            out / "elastic_resume.png",
            "Training loss, the resumed runs' loss minus the reference's, and below them each "
            "run's global batches: the leading bits of their SHA-256 as bars, green where the "
            "whole digest is the reference's, red where not.",
        ),
        report.table(
            [
                "loader",
                "run",
                "global batches as in the reference",
                "rows seen before the checkpoint",
                "largest difference in loss",
                "loss at the last step (reference)",
            ],
            rows,
        ),
        report.heading("What was done"),
        report.bullets(
            [
                "Both loaders read the same file of documents in random order (the Python "
                "language reference and the standard library's sources, cut at empty lines), with "
                "the same tokenizer, model, seed, and global batch; microbatches too have one size "
                "on any number of ranks.",
                f"TorchTitan's stock loader {refusal}. So its state is left out with "
                "checkpoint.exclude_from_loading, as users do. Its ranks then start again, each "
                "with the first document of its part of the file, and rows are trained on twice.",
                "Digests are taken where batches are handed to the trainer, for both loaders by "
                "the same code, which is not the loader's; they equal those in its audit log.",
                "What cannot be the same is the arithmetic: other rank counts add floating-point "
                "numbers in another order, and this is all that is left of the difference in loss.",
            ]
        ),
        *report.how_it_ran(meta, (out / "train.toml").read_text(), "their TOML"),
    ]
    return report.page(TITLE, lead, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser, out="outputs/elastic_resume")
    parser.add_argument("--dp", type=int, default=4, help="ranks of the reference")
    parser.add_argument("--resume", default="1,2,8", help="rank counts of the resumed runs")
    parser.add_argument("--checkpoint", type=int, default=30, help="step that is resumed from")
    parser.add_argument("--steps", type=int, help="default: twice as many as --checkpoint")
    args = parser.parse_args()
    args.steps = args.steps or 2 * args.checkpoint
    if args.steps <= args.checkpoint:
        parser.error(f"--steps {args.steps}: no step is left after --checkpoint {args.checkpoint}")
    args.resume = [int(ranks) for ranks in args.resume.split(",")]
    if not args.report_only:
        train(args)
    write_report(ROOT / args.out)


if __name__ == "__main__":
    main()
