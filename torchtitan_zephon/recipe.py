"""What decides the stream: the ``[zephon]`` tables as checked, frozen dataclasses."""

import dataclasses
import datetime
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from torchtitan_zephon.settings import nearest, read_table

FORMAT_VERSION = 1
"""Version of the stream and of the checkpoint; a change of either is a change of this number."""

MAX_WEIGHT_BITS = 40  # of weights made whole numbers, which the mixture compares exactly
_MAX_LANES = 4096


class RecipeError(ValueError):
    """A recipe that cannot be used: ``faults`` has one line for each thing to mend."""

    def __init__(self, faults: list[str]):
        self.faults = list(faults)
        count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''} in the recipe:"
        super().__init__("\n  ".join([count, *faults]))


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One dataset of the mixture."""

    name: str
    """Name in logs, counters and keys of the order; unique in a recipe."""
    path: str
    """A file, a folder (searched for shards of the format), a glob, or an fsspec URL of these."""
    weight: float = 1.0
    """Share of the tokens, relative to the other weights; taken to 9 significant digits."""
    format: Literal["auto", "jsonl", "parquet", "arrow"] = "auto"
    """Format of the shards; ``auto`` goes by the file name's ending."""
    text_field: str = "text"
    """Key (JSONL) or column (Parquet, Arrow) that holds the text."""
    tokens_field: str = ""
    """Key or column of token ids made beforehand, a list of integers a record, in the place of a
    text. A document is its list as it stands: BOS and EOS are in it, or are nowhere."""
    passes: int | None = None
    """Times it is gone through, 0 for ever; by default as ``zephon.passes`` says."""
    group: str = ""
    """Datasets of one group may share a row where ``packing.homogeneous = "group"``."""

    def faults(self) -> Iterator[str]:
        if not self.name:
            yield "name: must not be empty"
        if not self.path:
            yield "path: must not be empty"
        if not (math.isfinite(self.weight) and self.weight > 0):
            yield f"weight = {self.weight}: must be a finite number above 0"
        if self.passes is not None and self.passes < 0:
            yield f"passes = {self.passes}: must be 0 or more"
        if self.tokens_field and self.text_field != DatasetConfig.text_field:
            yield "text_field: not with tokens_field, which is read in its place"


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Where token ids come from."""

    path: str = ""
    """A TorchTitan / Hugging Face tokenizer folder, a tiktoken rank file, or the name of a tiktoken
    encoding. Empty: TorchTitan's ``hf_assets_path``."""
    encoding: str = ""
    """For a rank file: the tiktoken encoding whose splitting and special tokens it follows. Empty:
    the file's name, ``cl100k_base.tiktoken``."""
    special_tokens: Literal["text", "parse"] = "text"
    """A special token's text in a document is plain ``text``, or ``parse``-d into the token."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Records are conversations, of which the assistant's part is trained on."""

    messages_field: str = "messages"
    """Key of a record's messages: a list of objects with ``role`` and ``content``."""
    prompt_field: str = ""
    """With ``response_field``, for records without messages: key of the user's text."""
    response_field: str = ""
    """Key of the assistant's text, see ``prompt_field``."""
    template: str = ""
    """Path of a Jinja chat template. Empty: the tokenizer folder's ``chat_template.jinja``, else
    ``chat_template`` in its ``tokenizer_config.json``."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables for the template, such as ``enable_thinking``."""
    date: str = ""
    """Today's date for templates that ask for it, as ``2026-01-31``. Empty: they are told none, for
    the stream must not depend on the day."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens that are loss targets: what the assistant writes, or everything."""

    def faults(self) -> Iterator[str]:
        if bool(self.prompt_field) != bool(self.response_field):
            missing = "response_field" if self.prompt_field else "prompt_field"
            yield f"{missing}: missing; prompt_field and response_field come together"
        if not self.messages_field and not self.prompt_field:
            yield "messages_field: must not be empty"
        for name in sorted({"messages", "add_generation_prompt"} & set(self.variables)):
            yield f"variables.{name}: set for each conversation, so it cannot be given here"
        if self.date:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                yield f"date = {self.date!r}: must be a date such as '2026-01-31', or empty"


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How documents become rows of ``seq_len`` tokens."""

    algorithm: Literal["wrap", "first_fit", "best_fit", "best_fit_wrap", "none"] = "wrap"
    """``wrap`` concatenates and cuts, with no padding. ``first_fit`` and ``best_fit`` keep
    documents whole in the first, or the tightest, open row with room. ``best_fit_wrap`` splits one
    only to finish a row. ``none`` gives each document a row of its own."""
    open_bins: int = 16
    """Rows kept open in each lane; not for ``wrap`` and ``none``."""
    max_documents: int = 0
    """Documents, or stretches of them, that a row may hold; 0 for any number. Not for ``wrap``."""
    homogeneous: Literal["off", "full", "group"] = "off"
    """Whether a row holds only one dataset (``full``), or only datasets of one ``group``; not for
    ``wrap``."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What becomes of a document longer than a row: pieces of a row each, its first row only, or
    nothing; what is dropped is counted. Not for ``wrap`` and ``best_fit_wrap``, which split."""

    def faults(self) -> Iterator[str]:
        if not 1 <= self.open_bins <= 1024:
            yield f"open_bins = {self.open_bins}: must be from 1 to 1024"
        if self.max_documents < 0:
            yield f"max_documents = {self.max_documents}: must be 0 or more"
        default = PackingConfig()
        if self.algorithm == "wrap":
            for name in ("max_documents", "homogeneous"):
                if (value := getattr(self, name)) != getattr(default, name):
                    yield f"{name} = {value!r}: not with algorithm = 'wrap', which fills every row"
        if self.algorithm in ("wrap", "best_fit_wrap") and self.long_documents != "split":
            yield f"long_documents = {self.long_documents!r}: {self.algorithm} splits documents"


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig:
    """How far the order of the files is left behind."""

    buffer_size: int = 1000
    """Sequences shuffled among each other, summed over all lanes; 0 leaves them in order."""
    seed: int | None = None
    """Of the order in which shuffled sequences go out; by default ``zephon.seed``."""
    order: Literal["random", "sequential"] = "random"
    """Order in which chunks of the files, and documents inside a chunk, are visited."""

    def faults(self) -> Iterator[str]:
        if self.buffer_size < 0:
            yield f"buffer_size = {self.buffer_size}: must be 0 or more"
        if self.seed is not None and not 0 <= self.seed < 2**63:
            yield f"seed = {self.seed}: must be from 0 to 2**63-1"


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """Other weights from a number of tokens on: a step of a curriculum."""

    from_tokens: int
    """Tokens of the run from which on the weights hold; 0 for those that it begins with."""
    weights: dict[str, float]
    """Weight of each dataset by name; one that is not named is left out while the phase lasts."""

    def faults(self) -> Iterator[str]:
        if self.from_tokens < 0:
            yield f"from_tokens = {self.from_tokens}: must be 0 or more"
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                yield f"weights.{name} = {weight}: must be a finite number above 0"
        if not self.weights:
            yield "weights: must name a dataset"


@dataclass(frozen=True, kw_only=True)
class OperatorConfig:
    """A function of the user's on records, before they are tokenized."""

    kind: Literal["map", "filter", "flat_map"]
    """``map``: record -> record. ``filter``: record -> whether it stays. ``flat_map``: record ->
    records. A record is a dict as it stands in the file."""
    function: str
    """Its import path, ``module:function``."""
    datasets: tuple[str, ...] = ()
    """Names of the datasets that it is for; none means all."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Settings that never change a byte of the stream."""

    tokenizer_backend: Literal["auto", "gigatoken", "tokenizers", "tiktoken"] = "auto"
    """Library that tokenizes; ``auto`` takes the fastest that agrees with the reference."""
    prefetch_steps: int = 2
    """Optimizer steps prepared ahead of training; of very small ones up to 8 times as many."""
    threads: int = 1
    """Threads that read and tokenize; 1 does it all in the one producer thread. More are worth it
    where that is slow: the reference tokenizer, functions, storage far away."""
    runner: Literal["threads", "processes", "inline"] = "threads"
    """Where operators' functions run: in the threads that read, in as many ``processes`` (for
    functions that are slow Python), or ``inline``, with no thread but the producer."""
    extra_fields: tuple[Literal["document_ids", "cu_seqlens"], ...] = ()
    """What batches hold besides inputs, labels and positions. TorchTitan hands it to the model."""
    stall_warning_seconds: float = 60.0
    """Seconds that training waits for data before a warning tells what the loader is doing."""

    def faults(self) -> Iterator[str]:
        if not 1 <= self.prefetch_steps <= 1024:
            yield f"prefetch_steps = {self.prefetch_steps}: must be from 1 to 1024"
        if not 1 <= self.threads <= 256:
            yield f"threads = {self.threads}: must be from 1 to 256"
        if not self.stall_warning_seconds > 0:
            yield f"stall_warning_seconds = {self.stall_warning_seconds}: must be above 0"


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """The log of what each step was trained on."""

    enable: bool = True
    """Append one line a step to ``global_batches.jsonl``."""
    folder: str = "audit"
    """Folder of the log, under the run's ``dump_folder``."""


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """What a checkpoint of another recipe means."""

    on_recipe_change: Literal["refuse", "accept"] = "refuse"
    """``accept`` goes on under the new recipe: the stream is then no longer that of either."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Data for TorchTitan's Validator: one pass, in the order of the files."""

    datasets: tuple[DatasetConfig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All of ``[zephon]``, checked."""

    datasets: tuple[DatasetConfig, ...]
    seq_len: int
    """Tokens a row, from ``training.seq_len``."""
    seed: int = 0
    lanes: int | Literal["auto"] = "auto"
    """Number of logical streams. ``auto``: the largest divisor of the global batch up to 64, or on
    resume the checkpoint's."""
    passes: int = 0
    """Times that each dataset is gone through; 0 for ever."""
    on_exhausted: Literal["drop", "stop", "repeat"] = "drop"
    """When a dataset has had its passes: go on without it, stop when it would be drawn from, or let
    it begin again until all datasets have had theirs."""
    work_source: str = "weights"
    """What draws the next document: the ``weights``, ``sequential`` (dataset after dataset), or the
    import path, ``module:Class``, of a class with a method ``choose`` (see ``ops/mix.py``)."""
    phases: tuple[PhaseConfig, ...] = ()
    """Weights that change with the number of tokens trained on."""
    operators: tuple[OperatorConfig, ...] = ()
    """Functions on records, in this order."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    chat: ChatConfig | None = None
    """With this table, records are conversations."""
    packing: PackingConfig = field(default_factory=PackingConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)

    def faults(self) -> Iterator[str]:
        for where, group in (("", self.datasets), ("validation.", self.validation.datasets)):
            names = [d.name for d in group]
            for name in sorted({n for n in names if names.count(n) > 1}):
                yield f"{where}datasets: {names.count(name)} datasets are named {name!r}"
            if not names:
                continue
            if max(integer_weights([d.weight for d in group])).bit_length() > MAX_WEIGHT_BITS:
                yield (
                    f"{where}datasets: weights {[d.weight for d in group]} differ too much to be "
                    "compared exactly; use fewer digits or closer weights"
                )
        if self.passes < 0:
            yield f"passes = {self.passes}: must be 0 or more"
        yield from self._name_faults()
        if not 0 <= self.seed < 2**63:
            yield f"seed = {self.seed}: must be from 0 to 2**63-1"
        if self.lanes != "auto" and not 1 <= self.lanes <= _MAX_LANES:
            yield f"lanes = {self.lanes}: must be 'auto' or from 1 to {_MAX_LANES}"
        if self.seq_len < 1:
            yield f"seq_len = {self.seq_len}: training.seq_len must be 1 or more"

    def _name_faults(self) -> Iterator[str]:
        known = {d.name for d in self.datasets}
        for i, phase in enumerate(self.phases):
            for name in phase.weights:
                if name not in known:
                    yield f"phases[{i}].weights.{name}: no such dataset; {nearest(name, known)}"
            if i and phase.from_tokens <= self.phases[i - 1].from_tokens:
                yield f"phases[{i}].from_tokens = {phase.from_tokens}: must be above the one before"
        for i, operator in enumerate(self.operators):
            for name in operator.datasets:
                if name not in known:
                    yield f"operators[{i}].datasets: no dataset {name!r}; {nearest(name, known)}"
        for dataset in (*self.datasets, *self.validation.datasets) if self.chat else ():
            if dataset.tokens_field:
                yield f"datasets[{dataset.name}].tokens_field: not with chat, which reads messages"
        if self.on_exhausted != "drop" and self.work_source != "weights":
            yield f"on_exhausted = {self.on_exhausted!r}: only with work_source = 'weights'"
        if self.phases and self.work_source != "weights":
            yield f"work_source = {self.work_source!r}: not with phases, which change weights"

    def all_faults(self) -> Iterator[str]:
        """What types cannot say is wrong, of all tables, each with its full name."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            for i, part in enumerate(value if isinstance(value, tuple) else [value]):
                label = getattr(part, "name", i)
                where = f"{f.name}[{label}]" if isinstance(value, tuple) else f.name
                for fault in getattr(part, "faults", tuple)():
                    yield f"zephon.{where}.{fault}"
        yield from (f"zephon.{fault}" for fault in self.faults())

    def to_table(self) -> dict[str, Any]:
        """The ``[zephon]`` table that ``parse_recipe`` makes this recipe of, without defaults."""
        table = _without_defaults(self)
        del table["seq_len"]  # it is training.seq_len
        return table

    @property
    def finite(self) -> bool:
        """Whether the data ends."""
        finite = [(self.passes if d.passes is None else d.passes) > 0 for d in self.datasets]
        return any(finite) if self.on_exhausted == "stop" else all(finite)

    def for_validation(self, name: str = "") -> "Recipe":
        """The recipe of a validation stream: one lane, so the same rows at any rank count.

        ``name`` is one of the validation datasets; empty for all of them.
        """
        return dataclasses.replace(
            self,
            datasets=tuple(d for d in self.validation.datasets if name in ("", d.name)),
            validation=ValidationConfig(),
            lanes=1,
            passes=1,
            on_exhausted="drop",
            work_source="weights",
            phases=(),
            operators=tuple(o for o in self.operators if not o.datasets),
            shuffle=ShuffleConfig(buffer_size=0, order="sequential"),
            audit=AuditConfig(enable=False),
        )


def parse_recipe(
    table: dict[str, Any], *, seq_len: int, tokenizer_path: str | None = None
) -> Recipe:
    """The recipe in the ``[zephon]`` table of a training TOML.

    Args:
        table: the parsed table.
        seq_len: tokens a row, TorchTitan's ``training.seq_len``.
        tokenizer_path: used when the table names no tokenizer, TorchTitan's ``hf_assets_path``.

    Raises:
        RecipeError: with every fault found, each naming its setting in full.
    """
    faults: list[str] = []
    if "seq_len" in table:
        faults.append("zephon.seq_len: no such setting; it is training.seq_len")
    table = dict(table)
    if table.setdefault("datasets", []) == []:
        faults.append("zephon.datasets: at least one [[zephon.datasets]] table is needed")
    if "chat" in table:
        # A conversation cut in two teaches an answer without its question.
        table.setdefault("packing", {"algorithm": "best_fit", "long_documents": "drop"})
    recipe = read_table(Recipe, {**table, "seq_len": seq_len}, "zephon", faults)
    if recipe is not None and not recipe.tokenizer.path:
        tokenizer = dataclasses.replace(recipe.tokenizer, path=tokenizer_path or "")
        recipe = dataclasses.replace(recipe, tokenizer=tokenizer)
    if faults or recipe is None:
        raise RecipeError(faults)
    return recipe


def _without_defaults(config: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        missing = dataclasses.MISSING
        default = f.default if f.default_factory is missing else f.default_factory()
        if value == default or value is None:
            continue
        if dataclasses.is_dataclass(value):
            value = _without_defaults(value)
        elif isinstance(value, tuple):
            value = [_without_defaults(v) if dataclasses.is_dataclass(v) else v for v in value]
        table[f.name] = value
    return table


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers in the same ratio, 9 significant digits of each.

    What is not finite or below 0 counts as 0: such weights are refused elsewhere.
    """
    exact = [Fraction(f"{w:.9g}") if math.isfinite(w) and w > 0 else Fraction(0) for w in weights]
    whole = math.lcm(*(f.denominator for f in exact))
    integers = [int(f * whole) for f in exact]
    common = math.gcd(*integers) or 1
    return [i // common for i in integers]


def auto_lanes(global_batch_size: int) -> int:
    """The largest divisor of the global batch up to 64."""
    return next(n for n in range(min(64, global_batch_size), 0, -1) if global_batch_size % n == 0)


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The fields in which two fingerprinted recipes differ, as ``name: old -> new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            at = f"{where}.{key}" if where else str(key)
            if key not in new:
                yield f"{at}: {_short(old[key])} -> not there"
            elif key not in old:
                yield f"{at}: not there -> {_short(new[key])}"
            else:
                yield from differences(old[key], new[key], at)
    elif old != new:
        yield f"{where}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
