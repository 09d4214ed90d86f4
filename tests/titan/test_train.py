"""Training through the real trainer, torchrun and DCP checkpoints."""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.titan.launch import ROOT, digests, run, start, train, write_config
from torchtitan_zephon.titan.config import read_loader_meta


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and a run of it on 2 ranks that goes to step 6 with a checkpoint at step 3."""
    path = tmp_path_factory.mktemp("run")
    write_config(path, validate="true")
    output = train(2, path / "train.toml", "--training.local_batch_size", "3")
    (path / "output.txt").write_text(output)
    return path


def stopped_at_3(folder: Path, name: str) -> Path:
    """A copy of the run's folder as it was after its checkpoint at step 3."""
    out = folder / name
    shutil.copytree(folder / "out", out)
    shutil.rmtree(out / "checkpoint" / "step-6")
    log = out / "audit" / "global_batches.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    return out


def validation_losses(output: str) -> dict[int, tuple[float, float, float]]:
    """At each step the losses of the sets v and w, and what TorchTitan logs as the loss."""
    by_set = re.findall(r"validate step:\s+(\d+)\s+by set:\s+v: ([\d.]+)\s+w: ([\d.]+)", output)
    means = dict(re.findall(r"validate step:\s+(\d+)\s+loss:\s+([\d.]+)", output))
    return {int(step): (float(v), float(w), float(means[step])) for step, v, w in by_set}


@pytest.mark.parametrize("ranks", [4, 1, 3])
def test_saved_on_2_ranks_it_resumes_on_4_1_and_3_with_the_same_global_batches(
    ranks: int, folder: Path
) -> None:
    out = stopped_at_3(folder, f"resumed-{ranks}")
    output = train(ranks, folder / "train.toml", "--dump_folder", str(out))
    assert digests(out) == digests(folder / "out")
    assert [step for step, _ in digests(out)] == [1, 2, 3, 4, 5, 6]
    # The pass over the validation set has the same loss, to rounding.
    reference = validation_losses((folder / "output.txt").read_text())
    assert sorted(reference) == [1, 3, 6]
    assert validation_losses(output)[6] == pytest.approx(reference[6], abs=2e-3)
    v, w, mean = reference[6]
    assert mean == pytest.approx((v + w) / 2, abs=1e-4)
    assert v != w


def test_a_tensor_parallel_and_a_pipeline_parallel_run_have_the_same_global_batches(
    folder: Path,
) -> None:
    for name in ("tensor", "pipeline"):
        out = folder / name
        flags = [f"--parallelism.{name}_parallel_degree", "2", "--validator.no-enable"]
        if name == "pipeline":
            flags += ["--parallelism.pipeline_parallel_schedule", "1F1B"]
            flags += ["--training.local_batch_size", "4"]
        train(2, folder / "train.toml", "--dump_folder", str(out), *flags)
        assert digests(out) == digests(folder / "out")


def test_the_checkpoint_has_a_meta_entry_and_one_for_each_lane_that_a_person_can_read(
    folder: Path,
) -> None:
    path = folder / "out" / "checkpoint" / "step-3"
    entries = sorted(
        key
        for key in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if key.startswith("dataloader.")
    )
    assert entries == [f"dataloader.lane.{n:05d}" for n in range(12)] + ["dataloader.meta"]
    meta = read_loader_meta(str(path))
    assert meta is not None
    assert (meta["steps"], meta["sequences"], meta["lanes"]) == (3, 36, 12)


def test_lanes_follow_the_checkpoint_when_the_global_batch_changes_at_a_restart(
    folder: Path,
) -> None:
    out = stopped_at_3(folder, "batch-10")
    flags = ["--dump_folder", str(out), "--training.global_batch_size", "10"]
    output = train(2, folder / "train.toml", *flags, "--training.steps", "4")
    assert "12 lanes" in output
    assert (
        json.loads((out / "audit" / "global_batches.jsonl").read_text().splitlines()[-1])[
            "sequences"
        ]
        == 46
    )


def test_resuming_under_another_recipe_is_refused_with_both_values(folder: Path) -> None:
    out = stopped_at_3(folder, "refused")
    status, output = run(
        1,
        str(ROOT / "torchtitan_zephon" / "train.py"),  # the file itself works too
        "--config_file",
        str(folder / "train.toml"),
        "--dump_folder",
        str(out),
        "--zephon.datasets.b.weight",
        "0.4",
    )
    assert status != 0
    assert "datasets.b.weight: 0.3 -> 0.4" in output
    assert "zephon.resume.on_recipe_change" in output


def test_resuming_from_a_checkpoint_without_the_loaders_entry_is_an_error(folder: Path) -> None:
    out = stopped_at_3(folder, "no-entry")
    path = out / "checkpoint" / "step-3"
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    for key in list(metadata.state_dict_metadata):
        if key.startswith("dataloader."):
            del metadata.state_dict_metadata[key]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    status, output = run(
        1,
        "-m",
        "torchtitan_zephon.train",
        "--config_file",
        str(folder / "train.toml"),
        "--dump_folder",
        str(out),
    )
    assert status != 0
    assert "Missing key in checkpoint state_dict: dataloader.meta" in output


def test_faults_in_the_config_are_one_message_and_no_traceback(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    text = config.read_text().replace("steps = 6", "stepz = 6").replace("buffer_size", "bufer_size")
    config.write_text(text.replace("global_batch_size = 12", "").replace("0.7", '"most"'))
    status, output = run(2, "-m", "torchtitan_zephon.train", "--config_file", str(config))
    assert status != 0
    assert output.count("faults in") == 1
    assert 'torchtitan_zephon/train.py"' not in output  # no frame of ours
    for message in (
        "training.stepz = 6: no such setting; did you mean 'steps'?",
        "zephon.shuffle.bufer_size: no such setting; did you mean 'buffer_size'?",
        "zephon.datasets[a].weight = 'most': Expected float, got str",
        "training.global_batch_size = -1: must be set",
    ):
        assert message in output


def test_a_fault_in_the_data_ends_the_run_in_seconds_with_file_and_line_and_no_process_left(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[120] = '{"text": nul}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    status, output = run(
        2, "-m", "torchtitan_zephon.train", "--config_file", str(config), timeout=90
    )
    assert status != 0
    assert re.search(r"a\.jsonl, line 121: JSON is malformed", output)
    assert training_processes(tmp_path) == []


@pytest.mark.parametrize("how", ["interrupt", "kill a rank"])
def test_an_interrupted_run_ends_in_seconds_and_no_process_is_left(
    how: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    process = start(
        2,
        "-m",
        "torchtitan_zephon.train",
        "--config_file",
        str(config),
        "--training.steps",
        "100000",
        "--checkpoint.interval",
        "100000",
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if re.search(r"step:\s+3 ", line):
            break
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        ranks = [p for p in training_processes(tmp_path) if p != process.pid]
        os.kill(ranks[-1], signal.SIGKILL)
    begin = time.monotonic()
    rest, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - begin < 45, seen + rest
    assert training_processes(tmp_path) == []


def training_processes(folder: Path) -> list[int]:
    """The live processes (Linux) that were started with a config in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while it was looked at
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
