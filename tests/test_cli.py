"""The command as a user runs it: what it prints, its exit status, and one line for an error."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.audit.trained import train, write_data
from tests.helpers import Run
from tests.titan.launch import ROOT, write_config
from tests.toys import byte_tokenizer, write_jsonl
from torchtitan_zephon.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 6 steps with the same data, one of another seed, and checkpoints of the first."""
    folder = tmp_path_factory.mktemp("cli")
    table = write_data(folder)
    train(folder / "reference", table, [Run(2, 6)])
    state = train(folder / "resumed", table, [Run(3, 2)])
    dcp.save({"dataloader": state}, checkpoint_id=folder / "checkpoint/step-2", no_dist=True)
    state = train(folder / "resumed", table, [Run(1, 4)], state=state)
    dcp.save({"dataloader": state}, checkpoint_id=folder / "checkpoint/step-6", no_dist=True)
    state = train(folder / "long", table, [Run(1, 20)])
    dcp.save({"dataloader": state}, checkpoint_id=folder / "long/step-20", no_dist=True)
    train(folder / "other", {**table, "seed": 9}, [Run(1, 2)])
    return folder


def ran(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_runs_that_agree_are_told_so_with_their_barcodes_and_status_0(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ran(capsys, "compare", folder / "reference", folder / "resumed")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].split()[-1] == lines[2].split()[-1]
    assert lines[-1] == f"{folder / 'resumed'}: the same in all 6 steps that both have"


def test_runs_that_differ_have_status_1_and_json_says_where(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [folder / "reference", folder / "resumed", folder / "other"]
    status, out, _ = ran(capsys, "compare", *runs, "--any-recipe", "--json")
    told = json.loads(out)
    assert (status, told["same"], told["faults"]) == (1, False, [])
    assert [(r["same"], r["first_difference"], r["what"]) for r in told["runs"]] == [
        (True, None, None),
        (False, 1, "tokens"),
    ]
    status, out, _ = ran(capsys, "compare", *runs, "--any-recipe", "--no-rebuild")
    assert status == 1
    assert f"{folder / 'other'}: DIFFERENT from step 1 on, 2 of 2 steps (4 only in" in out


def test_a_figure_is_written_where_it_is_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    runs = [folder / "reference", folder / "resumed"]
    assert ran(capsys, "compare", *runs, "--png", tmp_path / "x.png")[0] == 0
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_past_step_is_shown_with_the_origin_and_text_of_every_piece(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show = ["show", "--run", folder / "resumed", "--step", 2, "--sequence", 7]
    status, out, err = ran(capsys, *show)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(
        f"step 2 of {folder / 'resumed'}: 12 sequences of 32 tokens on 3 ranks, recipe "
    )
    assert lines[1].startswith("made again in ")
    assert lines[1].endswith(", as logged")
    assert lines[3].startswith("sequence 7   rank 1   lane 3, number 3")
    (one,) = json.loads(ran(capsys, *show, "--json")[1])["sequences"]
    assert sum(p["stop"] - p["start"] for p in one["pieces"]) + one["padding"] == 32
    for piece in one["pieces"]:
        assert any(piece["where"] in line and piece["dataset"] in line for line in lines)
        assert any(json.dumps(piece["text"]) in line for line in lines)


def test_text_is_found_in_the_steps_that_are_searched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grep = ["show", "--run", folder / "reference", "--grep"]
    status, out, _ = ran(capsys, *grep, "row ", "--json")
    hits = json.loads(out)["hits"]
    assert status == 0
    assert {h["dataset"] for h in hits} == {"b"}
    assert all("row " in h["text"] and h["shard"].endswith("b.parquet") for h in hits)
    searched = [h for h in hits if 2 <= h["step"] <= 4]
    status, out, _ = ran(capsys, *grep, "row ", "--steps", "2:4")
    last = out.splitlines()[-1]
    assert last.startswith(f"{len(searched)} pieces in ")
    assert last.endswith("of steps 2 to 4 contain 'row '")
    assert ran(capsys, *grep, "nowhere")[1] == "0 pieces in 0 of steps 1 to 6 contain 'nowhere'\n"


def test_simulated_resumes_of_a_training_config_with_flags_behind_two_dashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    command = ["simulate", "--config", config, "--dp", 4, "--resume", "2,3,12", "--at", 3]
    status, out, err = ran(capsys, *command, "--steps", 5)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("global batch 12, 12 lanes, segments of 16 sequences, recipe ")
    assert [line.split() for line in lines[2:7]] == [
        ["arm", "ranks", "looked", "at", "steps", "global", "batches"],
        ["reference", "4", "4", "1-5"],
        ["resumed", "at", "3", "2", "2", "4-5", "the", "same"],
        ["resumed", "at", "3", "3", "3", "4-5", "the", "same"],
        ["resumed", "at", "3", "12", "12", "4-5", "the", "same"],
    ]
    flags = ["--", "--zephon.lanes", 5, "--training.global_batch_size", 24]
    told = json.loads(ran(capsys, *command, "--steps", 5, "--json", *flags)[1])
    assert (told["lanes"], told["global_batch_size"], told["same"]) == (5, 24, True)
    status, _, err = ran(capsys, *command, "--steps", 5, "--", "--training.global_batch_size", 10)
    assert (status, err.count("\n")) == (2, 1)
    assert "4 ranks: the global batch of 10 cannot be shared out evenly; 3 ranks: " in err


def test_a_checkpoint_says_its_step_sequences_lanes_and_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ran(capsys, "checkpoint", folder)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:4] == [
        f"{folder / 'checkpoint/step-6'}",
        "step 6",
        "sequences 72",
        "lanes 6, segments of 16 sequences",
    ]
    assert "seed = 3" in lines
    assert [line.split()[:2] for line in lines[-6:]] == [[str(n), "0"] for n in range(6)]
    lines = ran(capsys, "checkpoint", folder / "long/step-20")[1].splitlines()
    assert [line.split()[:2] for line in lines[-6:]] == [[str(n), "2"] for n in range(6)]
    told = json.loads(ran(capsys, "checkpoint", folder / "checkpoint/step-2", "--json")[1])
    assert (told["steps"], told["sequences"], told["faults"]) == (2, 24, [])
    assert [told["lane"][str(n)]["segment"] for n in range(6)] == [0] * 6


def test_two_checkpoints_are_compared_field_by_field(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = folder / "checkpoint"
    assert ran(capsys, "checkpoint", step / "step-6", "--diff", folder)[:2] == (0, "the same\n")
    status, out, _ = ran(capsys, "checkpoint", step / "step-2", "--diff", folder / "long/step-20")
    assert status == 1
    assert out.splitlines()[:3] == [
        "steps: 2 -> 20",
        "sequences: 24 -> 240",
        "lane.0.segment: 0 -> 2",
    ]


def test_lanes_that_are_missing_or_damaged_are_named_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = train(tmp_path / "run", write_data(tmp_path), [Run(1, 3)])
    state["lane"]["00003"] = state["lane"]["00003"].replace('"segment":0', '"segment":2')
    state["lane"]["00004"] = state["lane"]["00005"]
    del state["lane"]["00002"]
    dcp.save({"dataloader": state}, checkpoint_id=tmp_path / "bad", no_dist=True)
    status, out, _ = ran(capsys, "checkpoint", tmp_path / "bad")
    assert status == 1
    assert out.splitlines()[-3:] == [
        "FAULT: dataloader.lane.00002: missing",
        "FAULT: dataloader.lane.00003: damaged (its check sum does not match)",
        "FAULT: dataloader.lane.00004: damaged (it belongs to lane 5)",
    ]


def test_a_checkpoint_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = ran(capsys, "checkpoint", tmp_path)
    assert status == 2
    assert "no distributed checkpoint here" in err
    dcp.save({"dataloader": {"x": "y"}}, checkpoint_id=tmp_path / "stock", no_dist=True)
    status, _, err = ran(capsys, "checkpoint", tmp_path / "stock")
    assert status == 2
    assert "no entry dataloader.meta, so no state of this loader" in err
    state = {"meta": "", "lane": {}}
    dcp.save({"dataloader": state}, checkpoint_id=tmp_path / "empty", no_dist=True)
    assert (
        "the entry dataloader.meta is damaged" in ran(capsys, "checkpoint", tmp_path / "empty")[2]
    )
    next((tmp_path / "stock").glob("*.distcp")).unlink()
    metadata = pickle.loads((tmp_path / "empty" / ".metadata").read_bytes())
    (tmp_path / "stock" / ".metadata").write_bytes(pickle.dumps(metadata))
    status, _, err = ran(capsys, "checkpoint", tmp_path / "stock")
    assert (status, err.count("\n")) == (2, 1)
    assert "dataloader.meta: cannot be read ([Errno 2] No such file or directory" in err
    (tmp_path / "stock" / ".metadata").write_bytes(b"torn")
    assert "its .metadata cannot be read" in ran(capsys, "checkpoint", tmp_path / "stock")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "{0}/reference"], "compare needs two runs or more"),
        (["compare", "{0}/reference", "{0}/none"], "none: no such file or folder"),
        (["compare", "{0}/reference", "{0}/other"], "of another recipe than .*: seed: 3 -> 9"),
        (["show", "--run", "{0}/reference"], "either --step N or --grep TEXT"),
        (["show", "--run", "{0}/reference", "--step", "9"], "step 9 is not logged"),
        (
            ["show", "--run", "{0}/reference", "--step", "2", "--sequence", "12"],
            "step 2 has sequences 0 to 11",
        ),
        (["show", "--run", "{0}/reference", "--grep", "x", "--steps", "8:9"], "steps 1 to 6"),
        (["show", "--run", "{0}/reference", "--grep", "x", "--steps", "a:9"], "expected A:B"),
        (["show", "--run", "{0}/reference", "--grep", ""], "must not be empty"),
        (["simulate", "--config", "{0}/none.toml", "--dp", "1", "--steps", "3"], "cannot be read"),
        (
            ["simulate", "--config", "x", "--dp", "1", "--steps", "3", "--resume", "2;3"],
            "expected numbers of ranks",
        ),
        (["compare", "a", "b", "--", "--x"], "flags after -- are for simulate only"),
        (["checkpoint", "{0}/none"], "none: no such folder"),
    ],
)
def test_an_error_is_one_line_on_standard_error_and_status_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ran(capsys, *(a.format(folder) for a in arguments))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("torchtitan-zephon: ")
    assert re.search(message, err)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_zephon", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    for command in ("compare", "show", "simulate", "checkpoint"):
        assert command in done.stdout


def test_check_names_a_function_that_gives_other_records_each_time(tmp_path, capsys):
    write_jsonl(tmp_path / "d.jsonl", ["some text"] * 20)
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")

    def check(function: str) -> tuple[int, str]:
        config = tmp_path / "recipe.toml"
        config.write_text(
            f'[[zephon.datasets]]\nname = "d"\npath = "{tmp_path}/d.jsonl"\n'
            f'[[zephon.operators]]\nkind = "map"\nfunction = "tests.user_functions:{function}"\n'
            f'[zephon.tokenizer]\npath = "{tokenizer}"\n'
        )
        status = main(["check", "--config", str(config)])
        return status, capsys.readouterr().out

    assert check("shout") == (
        0,
        "1 functions ran twice on 4 chunks of each dataset: the same records each time\n",
    )
    status, out = check("number_of_calls")
    assert status == 1
    assert out.startswith("map tests.user_functions:number_of_calls: gives other records each time")
