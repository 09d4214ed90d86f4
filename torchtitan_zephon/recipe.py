"""What decides the stream: the ``[zephon]`` tables as checked, frozen dataclasses."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from torchtitan_zephon.settings import read_table

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
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    """Format of the shards; ``auto`` goes by the file name's ending."""
    text_field: str = "text"
    """Key (JSONL) or column (Parquet) that holds the text."""

    def faults(self) -> Iterator[str]:
        if not self.name:
            yield "name: must not be empty"
        if not self.path:
            yield "path: must not be empty"
        if not (math.isfinite(self.weight) and self.weight > 0):
            yield f"weight = {self.weight}: must be a finite number above 0"


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
class PackingConfig:
    """How documents become rows of ``seq_len`` tokens."""

    algorithm: Literal["wrap", "first_fit"] = "wrap"
    """``wrap`` concatenates and cuts, with no padding; ``first_fit`` keeps documents whole."""
    open_bins: int = 16
    """``first_fit``: rows kept open in each lane."""

    def faults(self) -> Iterator[str]:
        if not 1 <= self.open_bins <= 1024:
            yield f"open_bins = {self.open_bins}: must be from 1 to 1024"


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig:
    """How far the order of the files is left behind."""

    buffer_size: int = 1000
    """Sequences shuffled among each other, summed over all lanes; 0 leaves them in order."""
    order: Literal["random", "sequential"] = "random"
    """Order in which chunks of the files, and documents inside a chunk, are visited."""

    def faults(self) -> Iterator[str]:
        if self.buffer_size < 0:
            yield f"buffer_size = {self.buffer_size}: must be 0 or more"


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Settings that never change a byte of the stream."""

    tokenizer_backend: Literal["auto", "gigatoken", "tokenizers", "tiktoken"] = "auto"
    """Library that tokenizes; ``auto`` takes the fastest that agrees with the reference."""
    prefetch_steps: int = 2
    """Optimizer steps prepared ahead of training."""
    threads: int = 1
    """Threads that read and tokenize; 1 does it all in the one producer thread."""

    def faults(self) -> Iterator[str]:
        if not 1 <= self.prefetch_steps <= 1024:
            yield f"prefetch_steps = {self.prefetch_steps}: must be from 1 to 1024"
        if not 1 <= self.threads <= 256:
            yield f"threads = {self.threads}: must be from 1 to 256"


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
    passes: int | None = None
    """Times the data is gone through; None for ever."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
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
            if max(integer_weights(group)).bit_length() > MAX_WEIGHT_BITS:
                yield (
                    f"{where}datasets: weights {[d.weight for d in group]} differ too much to be "
                    "compared exactly; use fewer digits or closer weights"
                )
        if not 0 <= self.seed < 2**63:
            yield f"seed = {self.seed}: must be from 0 to 2**63-1"
        if self.lanes != "auto" and not 1 <= self.lanes <= _MAX_LANES:
            yield f"lanes = {self.lanes}: must be 'auto' or from 1 to {_MAX_LANES}"
        if self.seq_len < 1:
            yield f"seq_len = {self.seq_len}: training.seq_len must be 1 or more"

    def for_validation(self) -> "Recipe":
        """The recipe of the validation stream: one lane, so the same rows at any rank count."""
        return dataclasses.replace(
            self,
            datasets=self.validation.datasets,
            validation=ValidationConfig(),
            lanes=1,
            passes=1,
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
    # What comes from elsewhere, or is not offered yet, may not be set in the table.
    for name in ("seq_len", "passes"):
        if name in table:
            faults.append(f"zephon.{name}: no such setting")
    table = {k: v for k, v in table.items() if k not in ("seq_len", "passes")}
    if table.setdefault("datasets", []) == []:
        faults.append("zephon.datasets: at least one [[zephon.datasets]] table is needed")
    recipe = read_table(Recipe, {**table, "seq_len": seq_len}, "zephon", faults)
    if recipe is not None and not recipe.tokenizer.path:
        tokenizer = dataclasses.replace(recipe.tokenizer, path=tokenizer_path or "")
        recipe = dataclasses.replace(recipe, tokenizer=tokenizer)
    if faults or recipe is None:
        raise RecipeError(faults)
    return recipe


def integer_weights(datasets: tuple[DatasetConfig, ...]) -> list[int]:
    """The weights as the smallest integers in the same ratio (to 9 significant digits each)."""
    exact = [
        Fraction(f"{d.weight:.9g}") if math.isfinite(d.weight) and d.weight > 0 else Fraction(1)
        for d in datasets
    ]
    whole = math.lcm(*(f.denominator for f in exact))
    integers = [int(f * whole) for f in exact]
    common = math.gcd(*integers)
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
