"""Audit logs as real loaders write them: several ranks in one process, resumed on other counts."""

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.helpers import Run, merge_states
from tests.toys import byte_tokenizer, write_jsonl, write_parquet
from torchtitan_zephon.audit.gather import Publisher, Writer
from torchtitan_zephon.audit.log import AuditLog
from torchtitan_zephon.recipe import parse_recipe
from torchtitan_zephon.steps import Step, Steps
from torchtitan_zephon.titan import loader as loader_module
from torchtitan_zephon.titan.loader import ZephonDataLoader

BATCH, SEQ_LEN = 12, 32


def write_data(folder: Path) -> dict[str, Any]:
    """Two small datasets and the table of a recipe that mixes them; the tokenizer lies beside."""
    byte_tokenizer(folder / "tokenizer")
    write_jsonl(folder / "a" / "0.jsonl", [f"line {n:03d} " * (n % 7) for n in range(150)])
    write_jsonl(folder / "a" / "1.jsonl", [f"more {n:03d} " * (n % 5) for n in range(150)])
    write_parquet(folder / "b.parquet", [f"row {n:03d}, " * (n % 6) for n in range(400)], 64)
    return {
        "seed": 3,
        "lanes": 6,
        "shuffle": {"buffer_size": 24},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "datasets": [
            {"name": "a", "path": str(folder / "a"), "weight": 2.0},
            {"name": "b", "path": str(folder / "b.parquet")},
        ],
    }


def train(
    folder: Path,
    table: dict[str, Any],
    runs: list[Run],
    *,
    batch: int = BATCH,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Log ``runs``, each resumed from the state that the last one saved; returns the last state."""
    for run in runs:
        with _audited_without_process_groups():
            loaders = [_build(folder, table, rank, run.ranks, batch) for rank in range(run.ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(run.steps * (batch // run.ranks)):
            for loader in loaders:
                next(loader)
        state = merge_states([loader.state_dict() for loader in loaders])
        for loader in reversed(loaders):  # the first one writes what the others hand in
            loader.close()
    assert state is not None
    return state


def _build(
    folder: Path, table: dict[str, Any], rank: int, ranks: int, batch: int
) -> ZephonDataLoader:
    config = ZephonDataLoader.Config(
        recipe=parse_recipe(table, seq_len=SEQ_LEN),
        global_batch_size=batch,
        dump_folder=str(folder),
    )
    return config.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=1
    )


@contextmanager
def _audited_without_process_groups() -> Generator[None]:
    store = dist.HashStore()

    def auditor(config: Any, pipeline: Any, rank: int, ranks: int) -> Writer | Publisher:
        if rank > 0:
            return Publisher(store, rank)
        log = AuditLog(
            Path(config.dump_folder) / pipeline.recipe.audit.folder,
            pipeline.fingerprint,
            [d.name for d in pipeline.datasets],
            {"settings": dataclasses.asdict(pipeline.recipe), "identity": pipeline.identity},
        )
        return Writer(log, store, ranks)

    with mock.patch.object(loader_module, "_auditor", auditor):
        yield


@contextmanager
def fault(change: Callable[[int, int, Step], Step]) -> Generator[None]:
    """Let ``change`` have each step of each rank: (rank, step's number, step) -> step."""
    sound = Steps.take

    def faulty(self: Steps, count: int) -> list[Step]:
        return [change(self._rank, s.consumed // self._batch, s) for s in sound(self, count)]

    with mock.patch.object(Steps, "take", faulty):
        yield
