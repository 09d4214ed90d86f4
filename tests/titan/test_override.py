"""The loader in TorchTitan's own ``torchtitan.train``, through ``--override.imports``."""

import json
from pathlib import Path

import pytest
from torchtitan.components.dataloader import BaseDataLoader

from tests.titan.launch import digests, run, train, write_config
from torchtitan_zephon.recipe import RecipeError
from torchtitan_zephon.titan.override import zephon, zephon_validation

OVERRIDES = "torchtitan_zephon.titan.override"


def test_stock_torchtitan_train_gets_the_same_global_batches_from_a_recipe_file(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path)
    train(1, config, "--training.steps", "3", "--model.layers", "1")
    arguments = json.dumps({"recipe": str(config), "dump_folder": str(tmp_path / "stock")})
    validation = json.dumps({"recipe": str(config)})
    status, output = run(
        2,
        "-m",
        "tests.titan.stock",
        *("--module", "tests.titan.stock", "--config", "tiny"),
        *("--hf_assets_path", str(tmp_path / "tokenizer")),
        *("--dump_folder", str(tmp_path / "stock")),
        *("--training.seq_len", "32", "--training.steps", "3"),
        *("--training.local_batch_size", "2", "--training.global_batch_size", "12"),
        *("--validator.enable", "--validator.steps", "-1", "--validator.freq", "3"),
        "--override.imports",
        f"{OVERRIDES}.zephon={arguments}",
        f"{OVERRIDES}.zephon_validation={validation}",
    )
    assert status == 0, output[-4000:]
    assert "validate step:  3" in output
    assert digests(tmp_path / "stock") == digests(tmp_path / "out")
    assert [step for step, _ in digests(tmp_path / "stock")] == [1, 2, 3]


def test_a_recipe_file_that_is_missing_or_has_no_zephon_section_or_no_batch_is_refused(
    tmp_path: Path,
) -> None:
    config = BaseDataLoader.Config()
    with pytest.raises(RecipeError, match="absent.toml: .*No such file"):
        zephon(config, recipe=str(tmp_path / "absent.toml"))
    path = tmp_path / "r.toml"
    path.write_text("[training]\nsteps = 3\n")
    with pytest.raises(RecipeError, match=r"r.toml: no \[zephon\] section"):
        zephon_validation(config, recipe=str(path))
    path.write_text('[[zephon.datasets]]\nname = "a"\npath = "a.jsonl"\n')
    with pytest.raises(RecipeError, match="training.global_batch_size must be set"):
        zephon(config, recipe=str(path))
    loader = zephon(config, recipe=str(path), global_batch_size=12)
    assert (loader.global_batch_size, loader.dump_folder) == (12, "./outputs")
