import dataclasses
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.decoder import Decoder

from torchtitan_zephon.titan.config import (
    ConfigError,
    find_checkpoint_to_load,
    load_config,
    read_loader_meta,
)
from torchtitan_zephon.titan.loader import ZephonDataLoader

MODEL = """
[model]
module = "llama3"
config = "llama3_debugmodel"
layers = 2
"""
ZEPHON = """
[training]
global_batch_size = 12
seq_len = 64

[[zephon.datasets]]
name = "wiki.en"
path = "data/wiki"

[[zephon.datasets]]
name = "code"
path = "data/code"
"""


@pytest.fixture
def load(tmp_path):
    """Loads a TOML, given as text, with flags; the run's folder and tokenizer are in tmp_path."""

    def load_text(text, *flags):
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        file = tmp_path / "train.toml"
        file.write_text(text)
        folders = ["--dump_folder", f"{tmp_path}/out", "--hf_assets_path", f"{tmp_path}/tokenizer"]
        return load_config(["--config_file", str(file), *folders, *flags])

    return load_text


def faults_of(load, text, *flags):
    with pytest.raises(ConfigError) as caught:
        load(text, *flags)
    assert str(caught.value).splitlines()[0].endswith("train.toml:")
    return caught.value.faults


def save_checkpoint(folder, state):
    dcp.save({"weight": torch.ones(2), **state}, checkpoint_id=str(folder), no_dist=True)


def test_a_file_without_zephon_runs_the_registry_entry_as_it_stands(load):
    config = load(MODEL)
    assert type(config.dataloader) is HuggingFaceTextDataLoader.Config
    assert config.training.steps == 10
    assert len(config.model_spec.model.layers) == 2


def test_settings_of_every_depth_are_taken_from_the_file(load):
    config = load(
        MODEL
        + """
        [training]
        steps = 30
        max_norm = 2
        [checkpoint]
        enable = true
        exclude_from_loading = ["lr_scheduler"]
        [validator.dataloader]
        dataset_path = "data/held_out"
        [loss.loss_fn]
        global_vocab_size = 64
        [override]
        imports = ["my.module", ["my.other", { size = 3 }]]
        """
    )
    assert (config.training.steps, config.training.max_norm) == (30, 2)
    assert config.checkpoint.enable
    assert config.checkpoint.exclude_from_loading == ["lr_scheduler"]
    assert config.validator.dataloader.dataset_path == "data/held_out"
    assert config.loss.loss_fn.global_vocab_size == 64
    assert config.override.imports == ["my.module", ("my.other", {"size": 3})]


def test_flags_win_over_the_file(load):
    text = MODEL + "[training]\nsteps = 30\n"
    config = load(text, "--training.steps", "5", "--model.layers=1", "--checkpoint.enable")
    assert (config.training.steps, len(config.model_spec.model.layers)) == (5, 1)
    assert config.checkpoint.enable


@pytest.mark.parametrize("flag", ["--config-file", "--job.config_file"])
def test_the_file_may_be_named_by_other_spellings_of_the_flag(load, tmp_path, flag):
    load(MODEL)
    path = f"{flag}={tmp_path}/train.toml"
    assert load_config([path, f"--hf_assets_path={tmp_path}"]).hf_assets_path == str(tmp_path)


def test_the_model_may_be_named_by_torchtitans_own_flags(tmp_path):
    flags = ["--module", "torchtitan.models.llama3", "--config=llama3_debugmodel"]
    config = load_config([*flags, "--hf_assets_path", str(tmp_path)])
    assert config.model_spec is not None
    assert isinstance(config.model_spec.model, Decoder.Config)
    assert len(config.model_spec.model.layers) == 6


def test_a_vocabulary_size_resizes_embedding_output_and_loss(load):
    config = load(MODEL + "vocab_size = 320\n")
    model = config.model_spec.model
    assert (model.vocab_size, model.tok_embeddings.num_embeddings) == (320, 320)
    assert (model.lm_head.out_features, config.loss.loss_fn.global_vocab_size) == (320, 320)


def optimizer_arguments(config):
    assert isinstance(config.optimizer, OptimizersContainer.Config)
    return [group.optimizer_kwargs for group in config.optimizer.param_groups]


def test_a_flavor_takes_another_size_of_the_model_and_fits_the_loss(load):
    text = '[model]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\nflavor = "1B"\n'
    config = load(text)
    assert (config.model_spec.flavor, config.model_spec.model.dim) == ("1B", 2048)
    assert config.loss.loss_fn.global_vocab_size == config.model_spec.model.vocab_size == 128256
    (fault,) = faults_of(load, text.replace("1B", "1T"))
    assert fault.startswith("model.flavor = '1T': llama3 has no such flavor")


def test_optimizer_arguments_are_set_in_each_parameter_group(load):
    config = load(
        MODEL + "[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.99]\nimplementation = 'foreach'\n"
    )
    expected = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    assert optimizer_arguments(config) == [expected]
    assert config.optimizer.implementation == "foreach"


def test_optimizer_arguments_may_be_given_as_flags(load):
    text = MODEL + "[optimizer]\nlr = 1e-3\n"
    config = load(text, "--optimizer.lr", "2e-3", "--optimizer.weight-decay=0")
    assert optimizer_arguments(config)[0]["lr"] == 2e-3
    assert optimizer_arguments(config)[0]["weight_decay"] == 0


def test_parameter_groups_may_be_an_array_of_tables(load):
    config = load(
        MODEL
        + """
        [optimizer]
        lr = 1e-3
        [[optimizer.param_groups]]
        pattern = "norm"
        optimizer_name = "Adam"
        optimizer_kwargs = { eps = 1e-6 }
        [[optimizer.param_groups]]
        pattern = ".*"
        optimizer_name = "AdamW"
        optimizer_kwargs = { lr = 5e-4 }
        """
    )
    assert optimizer_arguments(config) == [{"eps": 1e-6}, {"lr": 1e-3}]


def test_activation_checkpointing_is_chosen_by_mode(load):
    text = MODEL + "[activation_checkpoint]\nmode = "
    assert load(text + '"none"\n').activation_checkpoint is None
    full = load(text + '"full"\npreserve_rng_state = false\n').activation_checkpoint
    assert full == FullAC.Config(preserve_rng_state=False)


def test_all_faults_are_reported_at_once_with_setting_value_and_spelling(load):
    text = """
        dump_foldr = "x"
        [model]
        module = "llama3"
        config = "llama3_debugmodel"
        layrs = 2
        """
    assert faults_of(load, text) == [
        "model.layrs: no such setting; did you mean 'layers'?",
        "dump_foldr = 'x': no such setting; did you mean 'dump_folder'?",
    ]
    text = (
        MODEL
        + """
        [training]
        stepz = 30
        seq_len = "64"
        dtype = "bfloat61"
        disable_cuda_graphs = 1
        [trainig]
        steps = 3
        [activation_checkpoint]
        mode = "ful"
        [optimizer]
        lr = "high"
        lrr = 1
        [loss]
        loss_fn = 3
        """
    )
    assert faults_of(load, text) == [
        "training.seq_len = '64': Expected int, got str",
        "training.dtype = 'bfloat61': did you mean 'bfloat16'?",
        "training.disable_cuda_graphs = 1: Expected bool, got int",
        "training.stepz = 30: no such setting; did you mean 'steps'?",
        "activation_checkpoint.mode = 'ful': did you mean 'full'?",
        "optimizer.lr = 'high': Expected float, got str",
        "optimizer.lrr = 1: no such setting; did you mean 'lr'?",
        "loss.loss_fn = 3: expected a table, [loss.loss_fn]",
        "trainig: no such setting; did you mean 'training'?",
    ]


def test_what_torchtitan_objects_to_is_reported_with_its_section(load):
    text = MODEL + "[checkpoint]\ninterval = 0\n[validator]\nsteps = -2\n"
    assert faults_of(load, text) == [
        "[checkpoint]: Checkpoint interval needs to be at least 1 step.",
        "[validator]: validation steps must be positive or -1",
    ]


def test_a_syntax_error_is_reported_with_line_and_column(load, tmp_path):
    place = f"{tmp_path}/train.toml:2:10"
    assert faults_of(load, "[training]\nsteps = 3x\n")[0].startswith(f"{place}: not valid TOML: ")


def test_a_file_that_is_missing_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: .*No such file"):
        load_config(["--config_file", f"{tmp_path}/none.toml"])


def test_a_model_that_torchtitan_does_not_know_is_reported(load):
    faults = faults_of(load, MODEL, "--config", "llama3_debugmodell")
    assert faults[0].startswith("[model]: Config function 'llama3_debugmodell' not found")


def test_more_layers_than_the_model_has_are_refused(load):
    assert faults_of(load, MODEL, "--model.layers", "9") == ["model.layers = 9: the model has 6"]


def test_the_loader_of_a_recipe_takes_the_place_of_the_stock_one(load, tmp_path):
    config = load(MODEL + ZEPHON)
    loader = config.dataloader
    assert isinstance(loader, ZephonDataLoader.Config)
    assert (loader.global_batch_size, loader.dump_folder) == (12, f"{tmp_path}/out")
    assert loader.recipe is not None
    assert (loader.recipe.seq_len, loader.recipe.tokenizer.path) == (64, f"{tmp_path}/tokenizer")
    assert not loader.validation


def test_a_config_with_a_recipe_can_be_logged_as_json(load):
    logged = json.loads(json.dumps(load(MODEL + ZEPHON).to_dict()))
    assert logged["dataloader"]["recipe"]["datasets"][0]["name"] == "wiki.en"


def test_flags_set_the_recipe_and_name_datasets_by_their_name(load):
    flags = ["--zephon.datasets.wiki.en.weight", "0.3", "--zephon.shuffle.buffer_size=100"]
    recipe = load(
        MODEL + ZEPHON, *flags, "--zephon.datasets.code.path", "data/py"
    ).dataloader.recipe
    assert [(d.name, d.path, d.weight) for d in recipe.datasets] == [
        ("wiki.en", "data/wiki", 0.3),
        ("code", "data/py", 1.0),
    ]
    assert recipe.shuffle.buffer_size == 100


def test_flags_for_what_a_recipe_does_not_have_are_reported(load):
    flags = ["--zephon.datasets.wikki.en.weight", "2", "--zephon.seed.x", "1"]
    assert faults_of(load, MODEL + ZEPHON + "[zephon]\nseed = 1\n", *flags) == [
        "--zephon.datasets.wikki.en.weight: no entry is named 'wikki.en'; did you mean 'wiki.en'?",
        "--zephon.seed.x: zephon.seed is a value, not a table",
    ]


def test_faults_of_the_file_and_of_the_recipe_are_reported_together(load):
    text = MODEL + ZEPHON.replace("global_batch_size", "stepz")
    assert [f.partition(":")[0] for f in faults_of(load, text, "--zephon.sed", "1")] == [
        "training.stepz = 12",
        "training.global_batch_size = -1",
        "zephon.sed",
    ]


def test_a_recipe_beside_a_stock_loader_is_refused(load):
    text = MODEL + ZEPHON + '[dataloader]\ndataset = "c4"\n'
    assert faults_of(load, text) == [
        "[dataloader]: has no effect beside [zephon]; remove one of the two"
    ]


def test_validation_data_goes_to_the_validator(load):
    text = MODEL + ZEPHON + '[[zephon.validation.datasets]]\nname = "held"\npath = "data/held"\n'
    config = load(text, "--validator.enable")
    assert isinstance(config.validator.dataloader, ZephonDataLoader.Config)
    assert config.validator.dataloader.validation
    # TorchTitan's Validator does this.
    assert not dataclasses.replace(config.validator.dataloader, infinite=False).infinite


def test_a_validator_without_validation_data_is_refused(load):
    faults = faults_of(load, MODEL + ZEPHON, "--validator.enable")
    assert [fault.partition(":")[0] for fault in faults] == ["validator.enable = true"]


def test_automatic_lanes_are_those_of_the_checkpoint(load, tmp_path):
    flags = ["--checkpoint.enable"]
    assert load(MODEL + ZEPHON, *flags).dataloader.recipe.lanes == "auto"
    state = {"dataloader": {"meta": '{"lanes": 6}', "lane": {"0": "{}"}}}
    save_checkpoint(tmp_path / "out/checkpoint/step-4", state)
    assert load(MODEL + ZEPHON, *flags).dataloader.recipe.lanes == 6
    assert load(MODEL + ZEPHON, *flags, "--zephon.lanes=4").dataloader.recipe.lanes == 4
    assert load(MODEL + ZEPHON).dataloader.recipe.lanes == "auto"


def test_the_checkpoint_found_is_the_one_that_torchtitan_loads(load, tmp_path):
    folder, start = tmp_path / "out/checkpoint", tmp_path / "start"
    flags = ["--checkpoint.enable"]
    from_start = [*flags, f"--checkpoint.initial_load_path={start}"]
    everything = [*from_start, "--checkpoint.no-initial_load_model_only"]
    save_checkpoint(start, {})
    assert find_checkpoint_to_load(load(MODEL, *flags)) is None
    assert find_checkpoint_to_load(load(MODEL, *from_start)) is None
    assert find_checkpoint_to_load(load(MODEL, *everything)) == str(start)
    save_checkpoint(folder / "step-3", {})
    save_checkpoint(folder / "step-20", {})
    (folder / "step-30").mkdir()  # of a run that ended while it saved: no .metadata yet
    assert find_checkpoint_to_load(load(MODEL, *everything)) == f"{folder}/step-20"
    chosen = [*flags, "--checkpoint.load_step", "3"]
    assert find_checkpoint_to_load(load(MODEL, *chosen)) == f"{folder}/step-3"
    without = [*flags, "--checkpoint.exclude_from_loading", "dataloader"]
    assert find_checkpoint_to_load(load(MODEL, *without)) is None


def test_the_meta_entry_is_read_alone_and_may_be_missing_or_damaged(tmp_path):
    save_checkpoint(tmp_path / "ours", {"dataloader": {"meta": '{"lanes": 6}'}})
    save_checkpoint(tmp_path / "stock", {"dataloader": {"dp_rank_0": b"?", "world_size": 1}})
    save_checkpoint(tmp_path / "model", {})
    save_checkpoint(tmp_path / "damaged", {"dataloader": {"meta": '{"lanes'}})
    (tmp_path / "empty").mkdir()
    assert read_loader_meta(str(tmp_path / "ours")) == {"lanes": 6}
    for other in ("stock", "model", "damaged", "empty"):
        assert read_loader_meta(str(tmp_path / other)) is None
