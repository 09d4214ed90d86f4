"""The loader's state through real distributed checkpoints, several ranks at a time."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.helpers import Run, global_batches, make_pipeline
from tests.titan.launch import digests, run
from tests.toys import byte_tokenizer, write_jsonl
from torchtitan_zephon.lane import StateError
from torchtitan_zephon.recipe import parse_recipe
from torchtitan_zephon.titan.loader import ZephonDataLoader


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def recipe_table(folder: Path, **more: Any) -> dict[str, Any]:
    path = write_jsonl(folder / "d.jsonl", [f"{n:04d}" * (n % 9) for n in range(150)])
    return {"datasets": [{"name": "d", "path": str(path)}], **more}


def test_lanes_that_two_ranks_make_are_saved_once_and_resumed_on_other_ranks_with_peers(
    tmp_path: Path, tokenizer: Path
) -> None:
    # 5 lanes and a batch of 12: slices move over the lanes from step to step, ranks share lanes.
    table = recipe_table(
        tmp_path,
        lanes=5,
        packing={"algorithm": "first_fit", "open_bins": 3},
        shuffle={"buffer_size": 10},
    )
    common = {
        "table": table,
        "tokenizer": str(tokenizer),
        "batch": 12,
        "dump_folder": str(tmp_path / "out"),
    }
    stages = [
        (4, {"tp": 1, "steps": 3, "save": str(tmp_path / "step-3")}),
        (3, {"tp": 1, "steps": 2, "load": str(tmp_path / "step-3"), "save": str(tmp_path / "5")}),
        (4, {"tp": 2, "steps": 3, "load": str(tmp_path / "5")}),
    ]
    for ranks, stage in stages:
        status, output = run(ranks, "-m", "tests.titan.dcp_worker", json.dumps(common | stage))
        assert status == 0, output[-4000:]
    pipeline = make_pipeline(table, seq_len=16, tokenizer=tokenizer)
    expected = global_batches(pipeline, batch=12, runs=[Run(1, 8)])
    assert digests(tmp_path / "out") == list(enumerate(expected, start=1))


def build(table: dict[str, Any], tokenizer: Path) -> ZephonDataLoader:
    recipe = parse_recipe(
        {**table, "audit": {"enable": False}}, seq_len=16, tokenizer_path=str(tokenizer)
    )
    return ZephonDataLoader.Config(recipe=recipe, global_batch_size=6).build(
        dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=16, local_batch_size=6
    )


def test_a_lane_entry_deleted_from_or_damaged_in_a_checkpoint_is_refused_and_named(
    tmp_path: Path, tokenizer: Path
) -> None:
    table = recipe_table(tmp_path)
    loader = build(table, tokenizer)
    next(loader)
    state = loader.state_dict()
    loader.close()
    path = tmp_path / "checkpoint"
    dcp.save({"dataloader": state}, checkpoint_id=path, no_dist=True)

    whole = build(table, tokenizer)
    dcp.load({"dataloader": whole}, checkpoint_id=path, no_dist=True)
    assert whole.state_dict() == state
    whole.close()

    damaged = {**state, "lane": {**state["lane"], "00003": state["lane"]["00003"][:-9]}}
    dcp.save({"dataloader": damaged}, checkpoint_id=tmp_path / "damaged", no_dist=True)
    other = build(table, tokenizer)
    with pytest.raises(StateError, match="entry for lane 3 is damaged"):
        dcp.load({"dataloader": other}, checkpoint_id=tmp_path / "damaged", no_dist=True)

    metadata = dcp.FileSystemReader(path).read_metadata()
    del metadata.state_dict_metadata["dataloader.lane.00003"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((CheckpointException, RuntimeError), match=r"dataloader\.lane\.00003"):
        dcp.load({"dataloader": other}, checkpoint_id=path, no_dist=True)
    other.close()
