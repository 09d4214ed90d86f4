"""This loader for TorchTitan's own ``torchtitan.train``, through ``--override.imports``.

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b \\
        --training.global_batch_size 1024 --override.imports \\
        'torchtitan_zephon.titan.override.zephon={"recipe": "x.toml", "global_batch_size": 1024}'

The recipe file has the ``[zephon]`` tables of a training config, and may be one: its other tables
are passed over, but for ``training.global_batch_size`` and the folder names.
"""

from pathlib import Path
from typing import Any

import tomli
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.override import override

from torchtitan_zephon.recipe import RecipeError, parse_recipe
from torchtitan_zephon.titan.loader import MISSING_GLOBAL_BATCH, ZephonDataLoader


@override(
    target=BaseDataLoader.Config,
    fqns=["dataloader"],
    description="The same global batches at any number of data-parallel ranks",
)
def zephon(
    config: BaseDataLoader.Config,
    *,
    recipe: str,
    global_batch_size: int = 0,
    dump_folder: str = "",
) -> ZephonDataLoader.Config:
    """The training loader of a recipe file, in the place of the one that ``config`` names.

    Args:
        config: what is replaced.
        recipe: path of the TOML file.
        global_batch_size: TorchTitan's training.global_batch_size, which it does not tell a loader;
            by default the file's.
        dump_folder: where the audit log goes; by default the file's, else TorchTitan's default.
    """
    del config
    return _config(recipe, global_batch_size, dump_folder)


@override(
    target=BaseDataLoader.Config,
    fqns=["validator.dataloader"],
    description="One unshuffled pass over [zephon.validation], the same rows at any rank count",
)
def zephon_validation(config: BaseDataLoader.Config, *, recipe: str) -> ZephonDataLoader.Config:
    """The validation loader of a recipe file: list it beside ``zephon``."""
    del config
    return _config(recipe, 1, "", validation=True)


def _config(
    path: str, batch: int, dump_folder: str, validation: bool = False
) -> ZephonDataLoader.Config:
    try:
        tables: dict[str, Any] = tomli.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError([f"{path}: {error}"]) from error
    if "zephon" not in tables:
        raise RecipeError([f"{path}: no [zephon] section"])
    batch = batch or tables.get("training", {}).get("global_batch_size", 0)
    if batch < 1:
        raise RecipeError(
            [f"{MISSING_GLOBAL_BATCH}; give it to the override too, beside the recipe"]
        )
    return ZephonDataLoader.Config(
        # The row length and the tokenizer's folder are the trainer's, who builds the loader.
        recipe=parse_recipe(tables["zephon"], seq_len=1),
        global_batch_size=batch,
        dump_folder=dump_folder or tables.get("dump_folder", "./outputs"),
        validation=validation,
    )
