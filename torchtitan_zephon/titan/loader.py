"""The data loader that TorchTitan's Trainer and Validator build."""

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchtitan.components.dataloader import BaseDataLoader

from torchtitan_zephon.audit.gather import Publisher, Writer
from torchtitan_zephon.audit.log import AuditLog, Share
from torchtitan_zephon.batch import Batch
from torchtitan_zephon.pipeline import Pipeline, check_datasets
from torchtitan_zephon.recipe import Recipe, RecipeError, auto_lanes
from torchtitan_zephon.steps import Step
from torchtitan_zephon.stream import BatchStream

logger = logging.getLogger(__name__)

_AUDIT_NUMBERS = itertools.count()  # loaders are built in one order on every rank


class ZephonDataLoader(BaseDataLoader):
    """Feeds one data-parallel rank its share of global batches that are the same at any rank count.

    Iterating yields ``({"input", "positions"}, labels)``, int64 tensors [local_batch_size, seq_len]
    on the CPU. The state goes through DCP's Stateful protocol.

    Raises:
        RecipeError: the recipe, its data or its tokenizer cannot be used; all faults at once.
        ValueError: the batch sizes do not fit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        recipe: Recipe | None = None
        """What decides the stream."""
        global_batch_size: int = 0
        """Sequences of a step over all ranks, TorchTitan's training.global_batch_size."""
        dump_folder: str = ""
        """Folder of the run's outputs, where the audit log goes."""
        model_vocab_size: int = 0
        """Token ids that the model knows; 0 leaves the tokenizer's unchecked."""
        validation: bool = False
        """Whether this feeds the Validator: one pass over ``recipe.validation``, unshuffled."""
        validation_set: str = ""
        """Which dataset of ``recipe.validation`` it is; empty for all of them."""
        infinite: bool = True
        """Set by TorchTitan's Validator; a validation pass always ends."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **kwargs: Any,
    ):
        recipe = config.recipe
        if recipe is None:
            raise ValueError("ZephonDataLoader needs a recipe: the [zephon] section of the TOML")
        batch = config.global_batch_size
        if config.validation:
            recipe = recipe.for_validation(config.validation_set)
            batch = local_batch_size * dp_world_size
        elif batch < 1:
            raise ValueError(MISSING_GLOBAL_BATCH)
        if recipe.seq_len != seq_len:
            recipe = dataclasses.replace(recipe, seq_len=seq_len)
        if not recipe.tokenizer.path:
            path = getattr(tokenizer, "tokenizer_path", "")  # of TorchTitan's, its hf_assets_path
            settings = dataclasses.replace(recipe.tokenizer, path=path)
            recipe = dataclasses.replace(recipe, tokenizer=settings)
        if recipe.lanes == "auto":
            recipe = dataclasses.replace(recipe, lanes=auto_lanes(batch))
        _check_batch(batch, local_batch_size, dp_world_size, snapshot_every_n_steps)
        pipeline = _checked_pipeline(recipe, config.model_vocab_size)
        self._extra_fields = recipe.runtime.extra_fields
        self._audit = None
        self._announced: dict[int, int] = {}
        self._announced_of: dict[int, tuple[int, str]] = {}
        if recipe.audit.enable:
            self._audit = _auditor(config, pipeline, dp_rank, dp_world_size)
        if self._audit is not None:
            # TorchTitan's own train.py closes no data loader; the log is finished all the same.
            weakref.finalize(self, self._audit.close)
        self._stream = BatchStream(
            pipeline,
            batch=batch,
            micro_batch=local_batch_size,
            rank=dp_rank,
            ranks=dp_world_size,
            digests=self._audit is not None,
            on_step=self._on_step if self._audit is not None else None,
        )
        if dp_rank == 0 and not config.validation:
            logger.info(
                "zephon: %d datasets, %d lanes, segments of %d sequences, tokenizer through %s, "
                "recipe %s",
                len(pipeline.datasets),
                pipeline.lanes,
                pipeline.segment_rows,
                pipeline.tokenizer.backend,
                pipeline.fingerprint[:12],
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return self

    def __next__(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return Batch(*next(self._stream), self._extra_fields).to_training()

    def _on_step(self, number: int, step: Step, before: dict[int, tuple[int, str]]) -> None:
        assert self._audit is not None
        started = []
        if before is not self._announced_of:  # the same dict until a lane comes to a new segment
            self._announced_of = before
            started = [
                (lane, segment, text)
                for lane, (segment, text) in before.items()
                if self._announced.get(lane, -1) < segment
            ]
            self._announced.update({lane: segment for lane, segment, _ in started})
        share = Share(step.digests, step.tokens, started)
        self._audit.submit(number, step.consumed, share)

    def state_dict(self) -> dict[str, Any]:
        """``meta`` and ``lane``, an entry for each lane of this rank; all JSON strings."""
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state saved at any rank count.

        Raises:
            StateError: an entry is missing or damaged, or the recipe is another one.
        """
        self._stream.load_state_dict(state_dict)
        self._announced, self._announced_of = {}, {}

    def close(self) -> None:
        """End the threads and finish the audit log; safe to call twice.

        Raises:
            AuditError: one of the last steps had other data than the log says.
        """
        self._stream.close()
        if self._audit is not None:
            self._audit.close()


MISSING_GLOBAL_BATCH = (
    "training.global_batch_size must be set: left out, TorchTitan takes local_batch_size times the "
    "number of data-parallel ranks, so the data of every step would change with the ranks"
)


def _checked_pipeline(recipe: Recipe, model_vocab_size: int) -> Pipeline:
    # Validation data is opened when the first validation is due: look at it now, not at step 500.
    faults = check_datasets(recipe.validation.datasets, "zephon.validation.datasets")
    try:
        pipeline = Pipeline(recipe)
    except RecipeError as error:
        raise RecipeError([*error.faults, *faults]) from error
    ids = pipeline.tokenizer.vocab_size
    if 0 < model_vocab_size < ids:
        faults.append(
            f"zephon.tokenizer.path = {recipe.tokenizer.path!r}: has {ids} token ids, the model "
            f"knows {model_vocab_size}; take the model's tokenizer, or set model.vocab_size"
        )
    if faults:
        raise RecipeError(faults)
    return pipeline


def _check_batch(batch: int, local: int, ranks: int, snapshot: int | None) -> None:
    if batch % (local * ranks) != 0:
        raise ValueError(
            f"training.global_batch_size ({batch}) must be a multiple of the local batch size "
            f"({local}) times the data-parallel ranks ({ranks})"
        )
    # TorchTitan does not tell a data loader its global batch, but the microbatches between two
    # checkpoints are a multiple of those of a step.
    if snapshot is not None and snapshot % (batch // (local * ranks)) != 0:
        raise ValueError(
            f"the loader's global batch ({batch}) is not TorchTitan's: {snapshot} microbatches of "
            f"{local} on {ranks} ranks lie between two checkpoints, which is no whole number of "
            "steps; give both the same training.global_batch_size"
        )


def _auditor(
    config: ZephonDataLoader.Config, pipeline: Pipeline, rank: int, ranks: int
) -> Writer | Publisher | None:
    recipe = pipeline.recipe
    store: Any = None
    writer = rank == 0
    if dist.is_available() and dist.is_initialized():
        writer = dist.get_rank() == 0
        # A client of its own: waiting on a shared one would hold up the training thread.
        store = dist.PrefixStore(
            f"zephon_audit_{next(_AUDIT_NUMBERS)}", distributed_c10d._get_default_store().clone()
        )
    elif ranks > 1:
        logger.warning("audit: off, since torch.distributed is not initialized to gather digests")
        return None
    if not writer:
        return Publisher(store, rank) if rank > 0 else None
    log = AuditLog(
        Path(config.dump_folder) / recipe.audit.folder,
        pipeline.fingerprint,
        [d.name for d in pipeline.datasets],
        {"settings": dataclasses.asdict(recipe), "identity": pipeline.identity},
    )
    return Writer(log, store, ranks)
