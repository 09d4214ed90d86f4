"""A recipe made ready to run: data found, tokenizer loaded and checked, lanes built on demand."""

import dataclasses
from concurrent.futures import Executor
from functools import cached_property
from typing import Any

from torchtitan_zephon.lane import Cursor, Lane
from torchtitan_zephon.ops.documents import Packer
from torchtitan_zephon.ops.first_fit import FirstFit
from torchtitan_zephon.ops.shuffle import segment_rows
from torchtitan_zephon.ops.tokenize import DocumentTokenizer, TokenizerError, load_tokenizer
from torchtitan_zephon.ops.wrap import Wrap
from torchtitan_zephon.recipe import (
    FORMAT_VERSION,
    DatasetConfig,
    Recipe,
    RecipeError,
    digest_json,
    integer_weights,
)
from torchtitan_zephon.sources.dataset import Dataset
from torchtitan_zephon.sources.feed import Feed, Position, Walk
from torchtitan_zephon.sources.storage import SourceError

_SAMPLED_DOCUMENTS = 32


class Pipeline:
    """All that a lane needs: datasets cut for ``recipe.lanes`` lanes, tokenizer, packing, shuffle.

    Raises:
        RecipeError: with every dataset or tokenizer that cannot be used.
    """

    def __init__(self, recipe: Recipe):
        if recipe.lanes == "auto":
            raise ValueError("recipe.lanes must be a number here; auto_lanes() tells the default")
        self.recipe = recipe
        self.lanes: int = recipe.lanes
        self.segment_rows = segment_rows(recipe.shuffle, self.lanes)
        faults: list[str] = []
        self.datasets: list[Dataset] = []
        samples: list[str] = []
        for config in recipe.datasets:
            try:
                dataset = Dataset(config, self.lanes)
                samples += dataset.first_texts(_SAMPLED_DOCUMENTS)
                self.datasets.append(dataset)
            except (SourceError, OSError) as error:
                faults.append(f"zephon.datasets[{config.name}]: {error}")
        try:
            self.tokenizer: DocumentTokenizer = load_tokenizer(
                recipe.tokenizer, recipe.runtime.tokenizer_backend, samples
            )
        except (TokenizerError, OSError) as error:
            faults.append(f"zephon.tokenizer: {error}")
        if faults:
            raise RecipeError(faults)
        self._weights = integer_weights(recipe.datasets)

    def start(self, lane: int) -> Cursor:
        """The cursor at the beginning of a lane."""
        return Cursor(
            lane=lane,
            positions=tuple((d.name, (0, 0, 0, 0)) for d in self.datasets),
            empty=(0,) * len(self.datasets),
        )

    def lane(self, cursor: Cursor, executor: Executor | None = None) -> Lane:
        """The lane that ``cursor`` belongs to, from there on."""
        recipe = self.recipe
        feeds = [
            Feed(
                Walk(
                    dataset=dataset,
                    lane=cursor.lane,
                    lanes=self.lanes,
                    seed=recipe.seed,
                    random_order=recipe.shuffle.order == "random",
                    passes=recipe.passes,
                    tokenize=self.tokenizer.encode,
                ),
                Position(*at),
                empty,
                executor,
            )
            for dataset, (_, at), empty in zip(
                self.datasets, cursor.positions, cursor.empty, strict=True
            )
        ]
        return Lane(feeds, self._weights, self._packer(), cursor)

    def _packer(self) -> Packer:
        pad_id = self.tokenizer.eos_id or 0
        if self.recipe.packing.algorithm == "wrap":
            return Wrap(self.recipe.seq_len, pad_id)
        return FirstFit(self.recipe.seq_len, pad_id, self.recipe.packing.open_bins)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the stream, named as in the recipe; what a resume compares."""
        recipe = self.recipe
        packing = dataclasses.asdict(recipe.packing)
        if recipe.packing.algorithm == "wrap":
            del packing["open_bins"]
        return {
            "format_version": FORMAT_VERSION,
            "seed": recipe.seed,
            "lanes": self.lanes,
            "seq_len": recipe.seq_len,
            "passes": recipe.passes,
            "datasets": {
                c.name: {"place": i, "weight": c.weight, **d.fingerprint()}
                for i, (c, d) in enumerate(zip(recipe.datasets, self.datasets, strict=True))
            },
            "tokenizer": self.tokenizer.identity,
            "packing": packing,
            "shuffle": dataclasses.asdict(recipe.shuffle),
        }

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ``identity``, in hex."""
        return digest_json(self.identity)


def check_datasets(datasets: tuple[DatasetConfig, ...], where: str) -> list[str]:
    """The faults of datasets that can be found without reading them, one line each."""
    faults = []
    for config in datasets:
        try:
            Dataset(config, lanes=1).first_texts(1)
        except (SourceError, OSError) as error:
            faults.append(f"{where}[{config.name}]: {error}")
    return faults
