"""The ``torchtitan-zephon`` command: what runs were trained on, shown and proven.

Exit status: 0, 1 where a difference or a fault was found, 2 where the question cannot be answered,
with one line on standard error that says why.
"""

import argparse
import logging
import os
import sys
from typing import Any

from torchtitan_zephon.audit import commands
from torchtitan_zephon.audit.barcode import NoMatplotlibError
from torchtitan_zephon.audit.log import AuditError

EPILOG = """\
A RUN is a run's dump folder, its audit folder, or a global_batches.jsonl file.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    argv = sys.argv[1:] if argv is None else argv
    # What follows "--" belongs to the training config; argparse would take it for arguments.
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    arguments = _parser().parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    if flags and arguments.command != "simulate":
        return _fail("flags after -- are for simulate only")
    arguments.flags = flags
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of our output, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AuditError, NoMatplotlibError, ValueError, OSError) as error:
        return _fail(error)


def _fail(error: Any) -> int:
    # Several faults come a line each; whoever reads standard error wants one.
    faults = getattr(error, "faults", None)
    text = "; ".join(faults) if faults else " ".join(str(error).split())
    print(f"torchtitan-zephon: {text}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torchtitan-zephon", description=__doc__.partition("\n")[0], epilog=EPILOG
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text, epilog=EPILOG)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON, for programs")
        return sub

    sub = command(
        "compare", commands.compare_command, "find the first step where runs had other data"
    )
    sub.add_argument("runs", nargs="+", metavar="RUN", help="the first is what others are held to")
    sub.add_argument("--png", metavar="FILE", help="draw the barcodes as a figure too")
    sub.add_argument("--any-recipe", action="store_true", help="also if the recipes differ")
    sub.add_argument(
        "--no-rebuild", action="store_true", help="by the logs alone, without reading any data"
    )

    sub = command(
        "show", commands.show_command, "show what a past step was trained on, and from which files"
    )
    sub.add_argument("--run", dest="folder", required=True, metavar="RUN")
    sub.add_argument("--step", type=int, metavar="N")
    sub.add_argument("--sequence", type=int, metavar="I", help="only this one of the step, from 0")
    sub.add_argument("--full", action="store_true", help="texts whole, not shortened")
    sub.add_argument("--grep", metavar="TEXT", help="find the steps whose text contains this")
    sub.add_argument("--steps", metavar="A:B", help="for --grep: steps A to B; default all")
    sub.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="where a dataset lies now, if it was moved",
    )
    sub.add_argument("--tokenizer", metavar="PATH", help="where the tokenizer lies now")

    sub = command(
        "simulate",
        commands.simulate_command,
        "make every rank's batches, with no ranks, and compare",
    )
    sub.add_argument("--config", required=True, metavar="FILE", help="TOML training config")
    sub.add_argument("--dp", type=int, required=True, metavar="N", help="ranks of the reference")
    sub.add_argument("--resume", default="", metavar="N,N,...", help="ranks of each resume")
    sub.add_argument("--at", type=int, default=0, metavar="STEP", help="where it is resumed")
    sub.add_argument("--steps", type=int, required=True, metavar="N", help="steps in all")
    sub.add_argument(
        "--sample-ranks", type=int, default=16, metavar="N", help="looked at, of more than 64"
    )
    sub.add_argument("--honest", action="store_true", help="a whole data stream for every rank")
    sub.add_argument("--png", metavar="FILE", help="draw the barcodes as a figure too")
    sub.usage = "torchtitan-zephon simulate [options] [-- TRAINING FLAGS]"

    sub = command(
        "check",
        commands.check_command,
        "run the recipe's functions twice, and name those that give other records each time",
    )
    sub.add_argument("--config", required=True, metavar="FILE", help="TOML with [zephon] tables")
    sub.add_argument("--chunks", type=int, default=4, metavar="N", help="of each dataset")

    sub = command("checkpoint", commands.checkpoint_command, "say what a saved loader state holds")
    sub.add_argument("folder", metavar="DIR", help="a checkpoint, or a folder of them: the newest")
    sub.add_argument("--diff", metavar="DIR2", help="what differs in another one")
    return parser
