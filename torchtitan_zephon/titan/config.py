"""TOML training configs for TorchTitan 0.3.0, which itself has only a config registry and flags.

`[model]` names the registry entry to start from, `[zephon]` is the loader's recipe, and every
other table mirrors the `Trainer.Config` tree of that entry. Flags win over the file. All faults
are reported at once, in one `ConfigError`.
"""

import dataclasses
import importlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import tomli
import torch.distributed.checkpoint as dcp
import tyro
from torch.distributed.checkpoint import DefaultLoadPlanner
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ConfigManager
from torchtitan.config.manager import custom_registry
from torchtitan.config.override import derive
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

from torchtitan_zephon.recipe import RecipeError, parse_recipe
from torchtitan_zephon.settings import nearest, read_table
from torchtitan_zephon.titan.cpu import adapt_config_for_cpu, cpu_faults, running_on_cpu
from torchtitan_zephon.titan.fields import changed_fields
from torchtitan_zephon.titan.loader import ZephonDataLoader
from torchtitan_zephon.titan.validator import ZephonValidator

OPTIMIZER = frozenset(f.name for f in dataclasses.fields(OptimizersContainer.Config))
"""What TorchTitan itself has in `[optimizer]`; other names are arguments of each optimizer."""


class ConfigError(ValueError):
    """A configuration that cannot be used: `faults` has one line for each thing to mend."""

    def __init__(self, source: str, faults: list[str]):
        self.faults = list(faults)
        count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''} in {source}:"
        super().__init__("\n  ".join([count, *faults]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The `[model]` table: which registry entry to start from, and how to shrink it."""

    module: str
    """A model that TorchTitan knows, `llama3`, or the dotted path of a config registry."""
    config: str
    """The entry of that registry to start from, `llama3_debugmodel`."""
    flavor: str | None = None
    """Another size of the model than the entry's, by its name in TorchTitan: `1B`."""
    layers: int | None = None
    """Keep only the first so many layers."""
    vocab_size: int | None = None
    """Resize the embedding, the output layer and the loss to a tokenizer with so many tokens."""

    def faults(self) -> Iterator[str]:
        for name in ("layers", "vocab_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield f"{name} = {value}: must be 1 or more"


def load_config(argv: list[str]) -> Trainer.Config:
    """The configuration that the flags `argv` ask for, `--config_file FILE` among them.

    `--model.NAME`, `--module` and `--config` set `[model]`, `--zephon.TABLE.NAME` sets `[zephon]`,
    `--optimizer.NAME` an optimizer argument in every parameter group; TorchTitan parses the rest.

    Raises:
        ConfigError: with every fault found in the file and in the recipe.
        SystemExit: raised by tyro, which prints what is wrong with the flags of TorchTitan's own.
    """
    path, own_flags, flags = split_flags(argv)
    source = path or "the command line"
    faults: list[str] = []
    tables = read_toml(path) if path else {}
    for name, text in own_flags:
        set_in_table(tables, name, text, faults)
    if not path and "model" not in tables:
        raise ConfigError(source, ["--config_file FILE: missing; FILE is a TOML training config"])
    recipe_table = tables.pop("zephon", None)
    model = read_table(ModelConfig, tables.pop("model", {}), "model", faults)
    if model is None:
        raise ConfigError(source, faults)
    config = registry_entry(model, source)
    resize_model(config, model, faults)
    if running_on_cpu():
        adapt_config_for_cpu(config)
    # Without validation, because settings of several tables may fit only once flags are applied.
    for name, value in changed_fields(config, tables, "", faults).items():
        setattr(config, name, value)
    try:
        # The last word on validity: every dataclass of the tree is constructed anew.
        config = tyro.cli(type(config), args=flags, default=config, registry=custom_registry)
    except SystemExit as end:
        if end.code and faults:  # tyro has printed what is wrong with the flags; add the file's
            raise ConfigError(source, faults) from end
        raise

    if running_on_cpu():
        faults += cpu_faults(config)
    if not os.path.isdir(config.hf_assets_path):
        faults.append(
            f'hf_assets_path = "{config.hf_assets_path}": no such folder; it must hold the '
            "tokenizer (tokenizer.json and tokenizer_config.json)"
        )
    if recipe_table is not None:
        if "dataloader" in tables:
            faults.append("[dataloader]: has no effect beside [zephon]; remove one of the two")
        use_zephon(config, recipe_table, faults)
    if faults:
        raise ConfigError(source, faults)
    return config


def use_zephon(config: Trainer.Config, table: dict[str, Any], faults: list[str]) -> None:
    """Put the loader of the recipe in `table` in the place of TorchTitan's."""
    batch = config.training.global_batch_size
    if batch < 1:
        faults.append(
            f"training.global_batch_size = {batch}: must be set to 1 or more with [zephon]; left "
            "at -1, TorchTitan takes local_batch_size x the data-parallel degree, so that the data "
            "of every step would change with the number of ranks"
        )
    seq_len, tokenizer = config.training.seq_len, config.hf_assets_path
    try:
        recipe = parse_recipe(table, seq_len=seq_len, tokenizer_path=tokenizer)
    except RecipeError as error:
        faults += error.faults
        return
    # Else the lanes, and with them the stream, would change when a restart changes the batch size.
    if recipe.lanes == "auto" and (checkpoint := find_checkpoint_to_load(config)):
        meta = read_loader_meta(checkpoint)
        recipe = dataclasses.replace(recipe, lanes=meta["lanes"]) if meta else recipe
    model = config.model_spec.model if config.model_spec else None
    loader = ZephonDataLoader.Config(
        recipe=recipe,
        global_batch_size=batch,
        dump_folder=config.dump_folder,
        model_vocab_size=model.vocab_size if isinstance(model, Decoder.Config) else 0,
    )
    config.dataloader = loader
    if recipe.validation.datasets:
        config.validator = derive(
            config.validator,
            ZephonValidator.Config,
            dataloader=dataclasses.replace(loader, validation=True),
        )
    elif config.validator.enable:
        faults.append(
            "validator.enable = true: there is nothing to validate on; "
            "add a [[zephon.validation.datasets]] table or disable it"
        )


def split_flags(argv: list[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """The path of the TOML, the `(setting, text)` flags that are ours, and the flags left over."""
    path, own, rest = None, [], []
    waiting = list(argv)
    while waiting:
        flag, equals, text = waiting.pop(0).partition("=")
        name = flag.removeprefix("--")
        name = name if name.startswith("zephon.") else name.replace("-", "_")
        name = f"model.{name}" if name in ("module", "config") else name
        table, _, key = name.partition(".")
        is_path = name in ("config_file", "job.config_file")
        is_ours = table in ("model", "zephon") or (
            table == "optimizer" and key.partition(".")[0] not in OPTIMIZER
        )
        if not flag.startswith("--") or not (is_path or is_ours):
            rest.append(flag + equals + text)
            continue
        if not equals and not waiting:
            raise ConfigError("the command line", [f"{flag}: expected a value after it"])
        text = text if equals else waiting.pop(0)
        if is_path:
            path = text
        else:
            own.append((name, text))
    return path, own, rest


def set_in_table(tables: dict[str, Any], name: str, text: str, faults: list[str]) -> None:
    """Set `name`, a dotted path, to `text`: a TOML value if it is one, else a string.

    In an array of tables the path names the entry by its `name`: `zephon.datasets.wiki.weight`.
    """
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text
    at, rest = cast(Any, tables), name
    while True:
        if isinstance(at, list):
            # Names of datasets may have dots in them, so they are matched, not split off.
            names = [str(item.get("name")) for item in at if isinstance(item, dict)]
            match = next((n for n in names if rest.startswith(f"{n}.")), None)
            if match is None:
                missing = rest.rpartition(".")[0] or rest
                faults.append(f"--{name}: no entry is named {missing!r}; {nearest(missing, names)}")
                return
            at = next(item for item in at if item.get("name") == match)
            rest = rest.removeprefix(f"{match}.")
        key, dot, rest_of_path = rest.partition(".")
        if not isinstance(at, dict):
            faults.append(f"--{name}: {name.removesuffix('.' + rest)} is a value, not a table")
            return
        if not dot:
            at[key] = value
            return
        at, rest = at.setdefault(key, {}), rest_of_path


def registry_entry(model: ModelConfig, source: str) -> Trainer.Config:
    """A fresh copy of the entry of TorchTitan's config registry that `[model]` names."""
    flags = ["--module", model.module, "--config", model.config]
    try:
        config, _ = ConfigManager()._load_config(flags)
    except (ImportError, ValueError) as error:
        raise ConfigError(source, [f"[model]: {error}"]) from error
    if not isinstance(config, Trainer.Config):
        raise ConfigError(source, [f"model.config = {model.config!r}: not a Trainer's config"])
    return config


def _registry_of(module: str) -> Any:
    """The Python module with the `model_registry` of a `[model] module`."""
    try:
        return importlib.import_module(f"torchtitan.models.{module}")
    except ImportError:
        return importlib.import_module(module)


def resize_model(config: Trainer.Config, model: ModelConfig, faults: list[str]) -> None:
    """Take the `flavor`, its first `layers` layers, and a vocabulary of `vocab_size`, as given."""
    if model.flavor is not None:
        try:
            config.model_spec = _registry_of(model.module).model_registry(model.flavor)
        except (ImportError, AttributeError, KeyError):
            faults.append(
                f"model.flavor = {model.flavor!r}: {model.module} has no such flavor; TorchTitan "
                "lists them beside the model_registry function of the module"
            )
            return
    decoder = config.model_spec.model if config.model_spec else None
    if not isinstance(decoder, Decoder.Config):
        if (model.flavor, model.layers, model.vocab_size) != (None, None, None):
            faults.append(
                f"model.flavor, layers, vocab_size: {model.config} is no decoder, and keeps its own"
            )
        return
    if model.layers is not None:
        if model.layers > len(decoder.layers):
            faults.append(f"model.layers = {model.layers}: the model has {len(decoder.layers)}")
        decoder.layers = decoder.layers[: model.layers]
    if model.vocab_size is not None:
        decoder.vocab_size = model.vocab_size
        decoder.tok_embeddings.num_embeddings = model.vocab_size
        decoder.lm_head.out_features = model.vocab_size
    if model.flavor is not None or model.vocab_size is not None:
        for _, loss, _, _ in config.loss.traverse(CrossEntropyLoss.Config):
            cast(CrossEntropyLoss.Config, loss).global_vocab_size = decoder.vocab_size


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: naming the file, and the line and column of a fault in its syntax.
    """
    try:
        return tomli.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, [f"cannot be read: {error}"]) from error
    except tomli.TOMLDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise ConfigError(path, [f"{place}: not valid TOML: {error.msg}"]) from error


def find_checkpoint_to_load(config: Trainer.Config) -> str | None:
    """The checkpoint whose data-loader state `CheckpointManager` will load, or None if none."""
    checkpoint = config.checkpoint
    if not checkpoint.enable or "dataloader" in checkpoint.exclude_from_loading:
        return None
    # Not constructed, which takes a model: the two methods called use their arguments only.
    manager = CheckpointManager.__new__(CheckpointManager)
    folder = filesystem.join(config.dump_folder, checkpoint.folder)
    step = checkpoint.load_step
    if step == -1:
        step = manager._find_load_step(folder)
    if step > 0:
        path = manager._create_checkpoint_id(step, folder)
    elif step == -1 and not checkpoint.initial_load_model_only:
        path = checkpoint.initial_load_path
    else:  # step 0 is a seed checkpoint, of which only the model is loaded
        return None
    return path if path and filesystem.isdir(path) else None


def read_loader_meta(path: str) -> dict[str, Any] | None:
    """The `meta` entry that a `ZephonDataLoader` saved in a checkpoint; None if there is none.

    Needs no process group, and reads nothing but that entry and the checkpoint's index.
    """
    if not filesystem.isfile(filesystem.join(path, ".metadata")):
        return None  # not of the DCP format: a Hugging Face export, of the model alone
    state: dict[str, Any] = {"dataloader": {"meta": ""}}
    # A partial load leaves an entry that is missing as it was, instead of raising an error.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
    try:
        return json.loads(state["dataloader"]["meta"])
    except ValueError:  # left empty, or damaged: that the loader reports, when it loads it
        return None
