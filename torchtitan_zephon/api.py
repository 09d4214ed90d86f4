"""The Python face: a pipeline written as a chain, which builds the very recipe that a TOML holds.

source = StaticMixtureWorkSource(
    datasets=[Dataset.from_path("web", "data/web"), Dataset.from_path("code", "data/code")],
    mixture={"web": 0.7, "code": 0.3},
    seed=42,
)
pipeline = (
    Pipeline(source)
    .tokenize(tokenizer_id="assets/tokenizer", field="text")
    .pack_flat(max_length=2048)
    .shuffle(buffer_size=1000)
    .batch(microbatch_size=8, global_batch_size=64)
)
for batch in pipeline:
    inputs, labels = batch.to_training()
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli
import tomli_w

from torchtitan_zephon.batch import Batch
from torchtitan_zephon.explain import explain
from torchtitan_zephon.ops.functions import Function, function_of, is_importable
from torchtitan_zephon.ops.mix import WorkSource
from torchtitan_zephon.pipeline import Pipeline as OpenPipeline
from torchtitan_zephon.pipeline import functions_of, unstable_functions
from torchtitan_zephon.recipe import (
    OperatorConfig,
    PackingConfig,
    Recipe,
    RecipeError,
    ShuffleConfig,
    TokenizerConfig,
    auto_lanes,
    parse_recipe,
)
from torchtitan_zephon.state import saved_lanes
from torchtitan_zephon.stream import BatchStream
from torchtitan_zephon.work_sources import CustomWorkSource, Source

Record = dict[str, Any]


class Pipeline:
    """A chain of steps from a source to batches; each method returns a new, longer chain.

    Iterating opens the data and yields ``Batch``; a second ``for`` goes on where the first stopped.
    ``state_dict`` and ``load_state_dict`` are those of PyTorch's Stateful protocol. Close it, or
    use it in a ``with``, to end its threads.
    """

    def __init__(self, source: Source | Recipe):
        if isinstance(source, Recipe):
            self.recipe = source
        else:
            self.recipe = Recipe(seq_len=2048, **source.settings())
        self._source: WorkSource | None = None
        if isinstance(source, CustomWorkSource):
            self._source = source.source
        self._functions: tuple[Function, ...] | None = None
        self._batch: tuple[int, int | None] = (1, None)
        self._ranks: tuple[int, int] = (0, 1)
        self._opened: OpenPipeline | None = None
        self._stream: BatchStream | None = None
        self._chosen = {"packing"} if isinstance(source, Recipe) else set()

    @classmethod
    def from_toml(cls, path: str | Path, *, seq_len: int = 2048, tokenizer: str = "") -> "Pipeline":
        """The pipeline of a training config, or of a file with ``[zephon]`` tables alone.

        ``training.seq_len``, ``training.global_batch_size``, ``training.local_batch_size`` and
        ``hf_assets_path`` are taken from the file where it has them.
        """
        tables = tomli.loads(Path(path).read_text("utf-8"))
        training = tables.get("training", {})
        recipe = parse_recipe(
            tables.get("zephon", {}),
            seq_len=training.get("seq_len", seq_len),
            tokenizer_path=tokenizer or tables.get("hf_assets_path"),
        )
        batch = training.get("global_batch_size")
        return cls(recipe).batch(training.get("local_batch_size", batch or 1), batch)

    def to_toml(self) -> str:
        """The ``[zephon]`` tables, and what belongs to ``[training]``, that build this pipeline.

        Raises:
            RecipeError: an operator or a work source has no import path.
        """
        recipe = self._complete_recipe()
        faults = [
            f"{f.kind} {f.name}: has no import path; define it at the top of a module"
            for f in self._functions or ()
            if not is_importable(f)
        ]
        if "<" in recipe.work_source:
            faults.append(f"work source {recipe.work_source}: has no import path")
        if faults:
            raise RecipeError(faults)
        micro, batch = self._batch
        training: dict[str, Any] = {"seq_len": recipe.seq_len, "local_batch_size": micro}
        training |= {"global_batch_size": batch} if batch else {}
        return tomli_w.dumps({"training": training, "zephon": recipe.to_table()})

    # -- steps -------------------------------------------------------------------------------------

    def options(
        self,
        io_options: Mapping[str, Any] | None = None,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        mesh: Any = None,
        **settings: Any,
    ) -> "Pipeline":
        """Settings that are no step of their own.

        Args:
            io_options: accepted for other loaders' sake, and of no effect: nothing is cached that
                reading again would not give as fast.
            dp_rank, dp_world_size: this data-parallel rank, and how many there are.
            mesh: a one-dimensional DeviceMesh in the place of the two.
            settings: of ``[zephon.runtime]`` (threads, runner, prefetch_steps, ...), or lanes,
                passes, on_exhausted of ``[zephon]``.
        """
        del io_options
        new = self._copy()
        runtime = {f.name for f in dataclasses.fields(self.recipe.runtime)}
        top = {"lanes", "passes", "on_exhausted"}
        unknown = [f"options({n}=...): no such setting" for n in settings if n not in runtime | top]
        if unknown:
            raise RecipeError(unknown)
        changed = {n: v for n, v in settings.items() if n in runtime}
        new._set(
            runtime=dataclasses.replace(self.recipe.runtime, **changed),
            **{n: v for n, v in settings.items() if n in top},
        )
        if mesh is not None:
            new._ranks = mesh.get_local_rank(), mesh.size()
        elif dp_rank is not None or dp_world_size is not None:
            new._ranks = dp_rank or 0, dp_world_size or 1
        return new

    def decode_text(self) -> "Pipeline":
        """Nothing to do: texts are strings already. Here so that others' pipelines read alike."""
        return self._copy()

    def map(self, function: Callable[[Record], Record]) -> "Pipeline":
        """Replace each record by what ``function`` makes of it."""
        return self._with(function_of("map", function))

    def filter(self, function: Callable[[Record], Any]) -> "Pipeline":
        """Keep the records for which ``function`` is true; the others are counted."""
        return self._with(function_of("filter", function))

    def flat_map(self, function: Callable[[Record], Sequence[Record]]) -> "Pipeline":
        """Replace each record by the records that ``function`` returns, any number of them."""
        return self._with(function_of("flat_map", function))

    def tokenize(
        self,
        tokenizer_id: str,
        field: str = "text",
        parallelism: int | None = None,
        special_tokens: Literal["text", "parse"] = "text",
        max_length: int | None = None,
        padding: bool = False,
        encoding: str = "",
    ) -> "Pipeline":
        """Texts under ``field`` to token ids.

        Args:
            tokenizer_id: a Hugging Face tokenizer folder, a tiktoken rank file or encoding.
            field: key of the text in every dataset that has no ``tokens_field``.
            parallelism: threads that read and tokenize; ``options(threads=)`` is the same.
            special_tokens: whether a special token's text in a document is parsed.
            max_length, padding: of rows with one document each, where no ``pack_flat`` follows.
            encoding: the tiktoken encoding that a rank file follows.
        """
        del padding  # rows are always padded where nothing else fills them
        new = self._copy()
        new._set(
            tokenizer=TokenizerConfig(
                path=tokenizer_id, special_tokens=special_tokens, encoding=encoding
            ),
            datasets=tuple(
                d if d.tokens_field else dataclasses.replace(d, text_field=field)
                for d in self.recipe.datasets
            ),
        )
        if parallelism is not None:
            new._set(runtime=dataclasses.replace(self.recipe.runtime, threads=parallelism))
        if max_length is not None:
            new._set(seq_len=max_length)
        if "packing" not in self._chosen:
            new._set(packing=PackingConfig(algorithm="none"))
        return new

    def pack_flat(self, max_length: int, algorithm: str = "wrap", **settings: Any) -> "Pipeline":
        """Documents to rows of ``max_length`` tokens; ``settings`` as in ``[zephon.packing]``."""
        new = self._copy()
        new._chosen.add("packing")
        packing: Any = {"algorithm": algorithm, **settings}
        new._set(seq_len=max_length, packing=PackingConfig(**packing))
        return new

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        order: Literal["random", "sequential"] = "random",
    ) -> "Pipeline":
        """Shuffle sequences among ``buffer_size`` others, summed over all ranks."""
        new = self._copy()
        new._set(shuffle=ShuffleConfig(buffer_size=buffer_size, seed=seed, order=order))
        return new

    def batch(self, microbatch_size: int, global_batch_size: int | None = None) -> "Pipeline":
        """Rows to batches.

        Args:
            microbatch_size: rows that iterating yields at a time.
            global_batch_size: rows of an optimizer step over all ranks; by default
                ``microbatch_size`` times the ranks. Set it, and steps stay the same at any rank
                count.
        """
        new = self._copy()
        new._batch = (microbatch_size, global_batch_size)
        return new

    # -- running -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(self._open_stream())

    def batches(self, stream: BatchStream) -> Iterator[Batch]:
        """What a stream of this pipeline yields, as batches."""
        extra = self.recipe.runtime.extra_fields
        for inputs, labels, positions in stream:
            yield Batch(inputs, labels, positions, extra)

    def as_dataset(self) -> Any:
        """An IterableDataset for ``torch.utils.data.DataLoader(..., batch_size=None)``."""
        from torchtitan_zephon.torch_dataset import PipelineDataset

        return PipelineDataset(self)

    def check(self, chunks: int = 4) -> list[str]:
        """Run some chunks of each dataset twice and name the functions whose results differ."""
        return unstable_functions(self.open(), chunks)

    def open(self) -> OpenPipeline:
        """What runs: datasets found, tokenizer loaded and checked.

        Raises:
            RecipeError: with everything that cannot be used.
        """
        if self._opened is None:
            recipe = self._complete_recipe()
            if recipe.lanes == "auto":
                recipe = dataclasses.replace(recipe, lanes=auto_lanes(self._global_batch()))
            self._opened = OpenPipeline(recipe, self._functions, self._source)
        return self._opened

    def state_dict(self) -> dict[str, Any]:
        """The place after the last complete step: JSON strings, see ``state.py``."""
        return self._open_stream().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state saved at any rank count; merge the ranks' ``lane`` entries before.

        Raises:
            StateError: an entry is missing or damaged, or the recipe is another one.
        """
        if self._opened is None and self.recipe.lanes == "auto":
            self._set(lanes=saved_lanes(state) or "auto")
        self._open_stream().load_state_dict(state)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def explain(self) -> str:
        """Print, and return, the plan: each step's worker and accumulator, threads and buffers."""
        text = explain(self.open(), self._global_batch(), self._ranks)
        print(text)
        return text

    def statistics(self) -> dict[str, int]:
        """Token counts of this rank's lanes, at the starts of the segments that it is in.

        ``read = trained + pending + dropped``; ``padding`` and documents left out stand beside it.
        """
        return self._open_stream().statistics()

    def new_stream(self) -> BatchStream:
        """A stream of its own from the beginning, which the caller closes."""
        rank, ranks = self._ranks
        return BatchStream(
            self.open(),
            batch=self._global_batch(),
            micro_batch=self._batch[0],
            rank=rank,
            ranks=ranks,
            digests=False,
        )

    def _open_stream(self) -> BatchStream:
        if self._stream is None:
            self._stream = self.new_stream()
        return self._stream

    def _global_batch(self) -> int:
        micro, batch = self._batch
        return batch or micro * self._ranks[1]

    def _complete_recipe(self) -> Recipe:
        operators = self.recipe.operators
        if self._functions is not None:
            operators = tuple(
                OperatorConfig(kind=f.kind, function=f.name, datasets=f.datasets)
                for f in self._functions
            )
        recipe = dataclasses.replace(self.recipe, operators=operators)
        faults = list(recipe.all_faults())
        if faults:
            raise RecipeError(faults)
        return recipe

    def _with(self, function: Function) -> "Pipeline":
        new = self._copy()
        before = self._functions
        if before is None:  # those of the recipe that it was made of
            before = functions_of(self.recipe)
        new._functions = (*before, function)
        return new

    def _copy(self) -> "Pipeline":
        new = Pipeline(self.recipe)
        new._source, new._functions = self._source, self._functions
        new._batch, new._ranks, new._chosen = self._batch, self._ranks, set(self._chosen)
        return new

    def _set(self, **changes: Any) -> None:
        self.recipe = dataclasses.replace(self.recipe, **changes)
