"""A recipe made ready to run: data found, tokenizer loaded and checked, lanes built on demand."""

import copy
import dataclasses
from concurrent.futures import Executor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_zephon.lane import Cursor, Lane
from torchtitan_zephon.ops.bins import Bins, groups_of
from torchtitan_zephon.ops.chat import ChatEncoder
from torchtitan_zephon.ops.documents import Packer
from torchtitan_zephon.ops.functions import (
    Function,
    FunctionError,
    apply_functions,
    faults_in_other_processes,
    resolve,
    source_digest,
)
from torchtitan_zephon.ops.mix import Mixture, Phase, Sequential, WorkSource
from torchtitan_zephon.ops.shuffle import emission_order, segment_rows, shuffled_rows
from torchtitan_zephon.ops.tokenize import (
    DocumentTokenizer,
    TokenIds,
    TokenizerError,
    load_tokenizer,
)
from torchtitan_zephon.ops.worker import Apply, Encode, Worker
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
_SAMPLED_CHARACTERS = 1 << 19  # of all datasets together: the reference takes 0.2 s for them


class Pipeline:
    """All that a lane needs: datasets, cut for ``recipe.lanes`` lanes, operators and tokenizer.

    Args:
        recipe: with a number of lanes.
        functions: the user's operators, in the place of those that the recipe names.
        source: what draws the next document, in the place of what the recipe names.

    Raises:
        RecipeError: with every dataset, function or tokenizer that cannot be used.
    """

    def __init__(
        self,
        recipe: Recipe,
        functions: tuple[Function, ...] | None = None,
        source: WorkSource | None = None,
    ):
        if recipe.lanes == "auto":
            raise ValueError("recipe.lanes must be a number here; auto_lanes() tells the default")
        self.recipe = recipe
        self.lanes: int = recipe.lanes
        self.shuffled_rows = shuffled_rows(recipe.shuffle.buffer_size, self.lanes)
        self.segment_rows = segment_rows(self.shuffled_rows)
        faults: list[str] = []
        self.functions = functions or ()
        if functions is None:
            try:
                self.functions = functions_of(recipe)
            except RecipeError as error:
                faults += error.faults
        self.source = _source(recipe, faults) if source is None else source
        if recipe.runtime.runner == "processes":
            faults += faults_in_other_processes(self.functions)
        self.datasets: list[Dataset] = []
        samples: list[str] = []
        for config in recipe.datasets:
            try:
                dataset = Dataset(config, self.lanes, self.reads_records(config.name))
                first = dataset.first(_SAMPLED_DOCUMENTS)
                most = _SAMPLED_CHARACTERS // (len(recipe.datasets) * len(first))
                samples += [t[:most] for t in first if isinstance(t, str)]
                self.datasets.append(dataset)
            except (SourceError, OSError) as error:
                faults.append(f"zephon.datasets[{config.name}]: {error}")
        try:
            self.tokenizer: DocumentTokenizer = load_tokenizer(
                recipe.tokenizer, recipe.runtime.tokenizer_backend, samples
            )
            self._encode: Encode = self.tokenizer.encode
            self._chat: dict[str, Any] | None = None
            if recipe.chat is not None:
                chat = ChatEncoder(recipe.chat, self.tokenizer, Path(recipe.tokenizer.path))
                self._encode, self._chat = chat.encode, chat.identity
        except (TokenizerError, OSError) as error:
            faults.append(f"zephon.tokenizer: {error}")
        if faults:
            raise RecipeError(faults)
        self.phases = _phases(recipe, self.lanes)

    def reads_records(self, dataset: str) -> bool:
        """Whether a dataset is read as whole records, and not as texts."""
        return self.recipe.chat is not None or bool(self.functions_for(dataset))

    def functions_for(self, dataset: str) -> tuple[Function, ...]:
        """The operators' functions for the records of one dataset."""
        return tuple(f for f in self.functions if not f.datasets or dataset in f.datasets)

    def start(self, lane: int) -> Cursor:
        """The cursor at the beginning of a lane."""
        return Cursor(
            lane=lane,
            positions=tuple((d.name, (0, 0, 0, 0)) for d in self.datasets),
            left_out=((0, 0),) * len(self.datasets),
            base=(0,) * len(self.datasets),
        )

    def lane(
        self, cursor: Cursor, executor: Executor | None = None, apply: Apply = apply_functions
    ) -> Lane:
        """The lane that ``cursor`` belongs to, from there on.

        ``executor`` reads and tokenizes ahead; ``apply`` runs the functions, elsewhere perhaps.
        """
        recipe, ids = self.recipe, TokenIds(self.tokenizer.vocab_size)
        feeds = []
        for config, dataset, (_, at), left_out in zip(
            recipe.datasets, self.datasets, cursor.positions, cursor.left_out, strict=True
        ):
            records = recipe.chat is None and self.reads_records(dataset.name)
            walk = Walk(
                dataset=dataset,
                lane=cursor.lane,
                lanes=self.lanes,
                seed=recipe.seed,
                random_order=recipe.shuffle.order == "random",
                passes=(recipe.passes if config.passes is None else config.passes) or None,
                endless=recipe.on_exhausted == "repeat",
                worker=Worker(
                    functions=self.functions_for(dataset.name),
                    field=dataset.wanted if records else None,
                    encode=ids if dataset.wanted.tokens else self._encode,
                    apply=apply,
                ),
            )
            feeds.append(Feed(walk, Position(*at), left_out, executor))
        mixture = Mixture(
            feeds,
            self.phases,
            recipe.on_exhausted,
            cursor.phase,
            cursor.base,
            self.source,
        )
        return Lane(mixture, self._packer(), cursor, endless=not recipe.finite)

    def emission_order(self, lane: int, first: int, rows: int) -> np.ndarray:
        """In which order a segment's rows go out, int64 [rows]; ``first`` is its first's number."""
        seed = self.recipe.seed if self.recipe.shuffle.seed is None else self.recipe.shuffle.seed
        return emission_order(seed, lane, first, rows, self.shuffled_rows)

    @property
    def pad_id(self) -> int:
        """The token id that padding reads."""
        return self.tokenizer.eos_id or 0

    def _packer(self) -> Packer:
        recipe, pad_id = self.recipe, self.pad_id
        if recipe.packing.algorithm == "wrap":
            return Wrap(recipe.seq_len, pad_id)
        groups = groups_of(recipe.packing, recipe.datasets)
        return Bins(recipe.packing, recipe.seq_len, pad_id, groups)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the stream, named as in the recipe; what a resume compares."""
        recipe = self.recipe
        packing = dataclasses.asdict(recipe.packing)
        if recipe.packing.algorithm in ("wrap", "none"):
            for name in ("open_bins", "max_documents", "homogeneous"):
                del packing[name]
        grouped = recipe.packing.homogeneous == "group"
        return {
            "format_version": FORMAT_VERSION,
            "seed": recipe.seed,
            "lanes": self.lanes,
            "seq_len": recipe.seq_len,
            "passes": recipe.passes,
            "on_exhausted": recipe.on_exhausted,
            "work_source": self._source_identity(),
            "phases": [dataclasses.asdict(phase) for phase in recipe.phases],
            "operators": [function.identity() for function in self.functions],
            "datasets": {
                c.name: {
                    "place": i,
                    "weight": c.weight,
                    "passes": c.passes,
                    **({"group": c.group} if grouped else {}),
                    **d.fingerprint(),
                }
                for i, (c, d) in enumerate(zip(recipe.datasets, self.datasets, strict=True))
            },
            "tokenizer": self.tokenizer.identity,
            "chat": self._chat,
            "packing": packing,
            "shuffle": dataclasses.asdict(recipe.shuffle),
        }

    def _source_identity(self) -> dict[str, str] | str:
        if self.source is None:
            return "weights"
        kind = type(self.source)
        name = f"{kind.__module__}:{kind.__qualname__}"
        return {"class": name, "source": source_digest(kind.choose)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ``identity``, in hex."""
        return digest_json(self.identity)


def functions_of(recipe: Recipe) -> tuple[Function, ...]:
    """The functions that a recipe names.

    Raises:
        RecipeError: with each that cannot be found.
    """
    found, faults = [], []
    for i, operator in enumerate(recipe.operators):
        try:
            function = resolve(operator.kind, operator.function)
            found.append(dataclasses.replace(function, datasets=operator.datasets))
        except FunctionError as error:
            faults.append(f"zephon.operators[{i}].{error}")
    if faults:
        raise RecipeError(faults)
    return tuple(found)


def _source(recipe: Recipe, faults: list[str]) -> WorkSource | None:
    if recipe.work_source == "weights":
        return None
    if recipe.work_source == "sequential":
        return Sequential()
    try:
        kind: Any = resolve("map", recipe.work_source).call
        source = kind()
        if callable(getattr(source, "choose", None)):
            return source
        faults.append(f"zephon.work_source = {recipe.work_source!r}: has no method choose")
    except FunctionError as error:
        faults.append(f"zephon.work_source: {str(error).removeprefix('function = ')}")
    except TypeError as error:
        faults.append(f"zephon.work_source = {recipe.work_source!r}: {error}")
    return None


def _phases(recipe: Recipe, lanes: int) -> tuple[Phase, ...]:
    """The phases of one lane: each begins when the lane's equal part of the tokens is drawn."""
    names = [d.name for d in recipe.datasets]
    phases = [(0, {d.name: d.weight for d in recipe.datasets})]
    if recipe.phases and recipe.phases[0].from_tokens == 0:
        phases = []
    phases += [(phase.from_tokens, phase.weights) for phase in recipe.phases]
    return tuple(
        Phase(-(-tokens // lanes), tuple(integer_weights([w.get(n, 0.0) for n in names])))
        for tokens, w in phases
    )


def unstable_functions(pipeline: Pipeline, chunks: int) -> list[str]:
    """The functions that give other results for the same records the second time, one line each.

    The first ``chunks`` chunks of each dataset are run twice, function by function.
    """
    faults = []
    for dataset in pipeline.datasets:
        functions = pipeline.functions_for(dataset.name)
        for chunk in range(min(chunks, dataset.num_chunks) if functions else 0):
            place = f"dataset {dataset.name!r}, chunk {chunk} in {dataset.place_of(chunk)[0].path}"
            for records in dataset.blocks(chunk):
                for function in functions:
                    once = apply_functions([function], copy.deepcopy(records), place)
                    twice = apply_functions([function], copy.deepcopy(records), place)
                    if once != twice:
                        name = f"{function.kind} {function.name}"
                        faults.append(f"{name}: gives other records each time, on {place}")
                        break
                    records = once[0]
                else:
                    continue
                break
    return list({fault.split(":")[0]: fault for fault in faults}.values())


def check_datasets(datasets: tuple[DatasetConfig, ...], where: str) -> list[str]:
    """The faults of datasets that can be found without reading them, one line each."""
    faults = []
    for config in datasets:
        try:
            Dataset(config, lanes=1, whole_records=True).first(1)
        except (SourceError, OSError) as error:
            faults.append(f"{where}[{config.name}]: {error}")
    return faults
