"""Train with TorchTitan from a TOML: `torchrun ... -m torchtitan_zephon.train --config_file FILE`.

TorchTitan's own `train.py`, plus the TOML, the CPU where there is no accelerator, one message
instead of a traceback per rank for a faulty configuration, and an end within seconds when a
rank fails.
"""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

if not __package__:  # run as a file: its own folder is on the path, instead of the package's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torchtitan
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

from torchtitan_zephon.lane import StateError
from torchtitan_zephon.recipe import RecipeError
from torchtitan_zephon.titan.config import ConfigError, load_config
from torchtitan_zephon.titan.cpu import use_cpu_if_no_accelerator

GRACE_S = 10.0
"""Seconds a failed or terminated rank has for closing what it opened, before it just ends."""
REPORT_S = 5.0
"""Seconds that ranks wait with their failure while another one of the node reports it."""

RANK, LOCAL_RANK = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))


def main(argv: list[str] | None = None) -> int:
    """Train as the flags `argv` (default: the command line's) ask; returns the exit status.

    Status 1 means a faulty configuration, reported once a node, or an error, logged by its rank.
    """
    init_logger()
    if use_cpu_if_no_accelerator():
        logger.info("No accelerator: training on the CPU, through gloo.")
    argv = sys.argv[1:] if argv is None else argv
    try:
        if LOCAL_RANK == 0:
            config = load_config(argv)
        else:  # tyro prints --help and what is wrong with flags; all ranks would print the same
            nowhere = io.StringIO()
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                config = load_config(argv)
    except ConfigError as error:
        report(error)
        return 1
    except SystemExit as end:
        if LOCAL_RANK != 0 and end.code:
            time.sleep(REPORT_S)
        raise
    logger.info("torchtitan version: %s", torchtitan.__version__)
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    if config.comm.mode == "local_tensor":
        # TorchTitan cannot initialise a model in this mode yet; the configuration was checked.
        logger.info("comm.mode is local_tensor: nothing is trained.")
        return 0
    return train(config)


def train(config: Trainer.Config) -> int:
    """Build the trainer, train (or save a seed checkpoint) and close it; returns the exit status.

    The data loader is closed whatever happens: an error, ^C or SIGTERM.
    """
    trainer: Trainer | None = None
    end_on_sigterm()
    try:
        trainer = cast(Trainer, config.build())
        if config.checkpoint.create_seed_checkpoint:
            save_seed_checkpoint(trainer)
        else:
            trainer.train()
    except BaseException as error:
        status = status_of(error)
        end_after(GRACE_S, status)
        report(error)
        close(trainer)
        # The process group is left alone: taking it down may wait for peers that are stuck.
        return status
    if not close(trainer):
        return 1
    if torch.distributed.is_initialized():
        with sl.log_trace_span("torch_distributed_teardown"):
            torch.distributed.destroy_process_group()
    logger.info("Process group destroyed")
    return 0


def report(error: BaseException) -> None:
    """Say what ended this process: in words for what a user can mend, else with a traceback."""
    if isinstance(error, ConfigError | RecipeError):
        # All ranks of a node find the same. One says so, and the others give it the time to:
        # torchrun ends them all as soon as it sees one fail.
        if LOCAL_RANK == 0:
            print(error, file=sys.stderr)
        else:
            time.sleep(REPORT_S)
    elif isinstance(error, StateError):
        logger.error("Rank %s cannot resume: %s", RANK, error)
    elif not isinstance(error, SystemExit | KeyboardInterrupt):
        logger.error("Rank %s failed", RANK, exc_info=error)


def save_seed_checkpoint(trainer: Trainer) -> None:
    """Save the freshly initialised model, unsharded, as step 0."""
    if torch.distributed.get_world_size() != 1:
        raise ValueError("a seed checkpoint is unsharded: create it with one process")
    if not trainer.config.checkpoint.enable:
        raise ValueError("checkpoint.create_seed_checkpoint needs checkpoint.enable")
    trainer.checkpointer.save(curr_step=0, last_step=True)
    logger.info("Created seed checkpoint")


def close(trainer: Trainer | None) -> bool:
    """Close the data loaders, then what TorchTitan closes; an error in one keeps none from it.

    Returns whether all went well: the loader's last check of the audit log is made here.
    """
    owners = (trainer, getattr(trainer, "validator", None))
    well = True
    for thing in (*(getattr(owner, "dataloader", None) for owner in owners), trainer):
        if hasattr(thing, "close"):
            try:
                thing.close()
            except Exception:
                logger.exception("Closing %s failed", type(thing).__name__)
                well = False
    return well


def status_of(error: BaseException) -> int:
    """The exit status that says what ended a process, by the conventions of the shell."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def end_after(seconds: float, status: int) -> None:
    """End this process in so many seconds, come what may, unless it ends before that."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=end, name="end-after", daemon=True).start()


def end_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in the main thread, so that `finally` and `except` blocks run.

    Python runs the handler only between two bytecodes, and a rank whose peers are gone may be
    stuck inside one, in a collective. So the signal also wakes a thread that sets a deadline.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the business of whoever owns the main thread

    def on_sigterm(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait_for_sigterm() -> None:
        while signal.SIGTERM not in os.read(reader, 64):
            pass
        end_after(GRACE_S, 128 + signal.SIGTERM)

    threading.Thread(target=wait_for_sigterm, name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A forked data-loading worker shares the pipe, and its SIGTERM is not ours.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


if __name__ == "__main__":
    exit_status = main()
    if exit_status:
        # Not sys.exit: after a failure, threads and collectives may never let it finish.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)
