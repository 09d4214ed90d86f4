"""The loaders that are compared, each driven through its public API.

Every builder gets a `Job` and returns a `Peer`: batches of `job.batch` rows of 2048 tokens, made of
the same corpus with the same tokenizer file.
"""

import itertools
import json
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.process import Job

SEQ_LEN = 2048
OPEN_BINS = 16


@dataclass
class Peer:
    """A loader that is ready to be measured."""

    batches: Iterator[Any]
    fill: Callable[[Any], float]
    """The share of a batch's places that hold tokens to train on."""
    state: Callable[[], Any]
    """What the loader would put in a checkpoint now."""
    resume: Callable[[Any], None]
    """Go on from a state; before the first batch."""
    detail: str = ""
    close: Callable[[], None] = lambda: None


def build(job: Job, scratch: Path) -> Peer:
    """Build the loader of a job, as far as it can be built before the first batch is asked for."""
    return {"ours": _ours, "stock": _stock, "zephon": _zephon, "grain": _grain}[job.peer](
        job, scratch
    )


def import_everything(peer: str) -> None:
    """Import what a peer needs: imports, torch above all, take seconds and are no loader's time."""
    import torch  # noqa: F401

    if peer == "ours":
        import torchtitan.trainer  # noqa: F401
    elif peer == "stock":
        import torchtitan.hf_datasets.text_datasets
        import torchtitan.trainer  # noqa: F401
    elif peer == "zephon":
        import transformers  # noqa: F401
        import zephon.work  # noqa: F401
    elif peer == "grain":
        import grain  # noqa: F401


# --- this project ---------------------------------------------------------------------------------


def our_config(job: Job, scratch: Path) -> Any:
    """The configuration of this project's loader: its defaults, but for what the job names."""
    from torchtitan_zephon.recipe import parse_recipe
    from torchtitan_zephon.titan.loader import ZephonDataLoader

    packing: dict[str, Any] = {"algorithm": job.packing}
    if job.packing != "wrap":
        # What the peers do with documents longer than a row.
        packing |= {"long_documents": "drop", "open_bins": OPEN_BINS}
    dataset = {"path": job.corpus}
    if job.fmt.startswith("tokens-"):
        dataset["tokens_field"] = "input_ids"
    table: dict[str, Any] = {
        "datasets": [{"name": f"corpus{i}", **dataset} for i in range(job.datasets)],
        "packing": packing,
        "shuffle": {"buffer_size": job.buffer_size},
        "audit": {"enable": job.audit},
        "runtime": {"threads": job.threads, "tokenizer_backend": job.backend},
    }
    if job.lanes is not None:
        table["lanes"] = job.lanes
    return ZephonDataLoader.Config(
        recipe=parse_recipe(table, seq_len=SEQ_LEN, tokenizer_path=job.tokenizer),
        global_batch_size=job.batch * job.options.get("ranks", 1),
        dump_folder=str(scratch),
    )


def _ours(job: Job, scratch: Path) -> Peer:
    loader = our_config(job, scratch).build(
        dp_world_size=job.options.get("ranks", 1),
        dp_rank=0,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=min(job.batch, 8),
    )
    return Peer(
        batches=iter(loader),
        fill=lambda batch: float((batch[1] != -100).float().mean()),
        state=loader.state_dict,
        resume=loader.load_state_dict,
        detail=loader._stream.pipeline.tokenizer.backend,
        close=loader.close,
    )


# --- TorchTitan's stock loader --------------------------------------------------------------------


def _stock(job: Job, scratch: Path) -> Peer:
    """TorchTitan's own loader, built as its trainer builds it; it has one packing, wrap."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    if job.packing != "wrap":
        raise ValueError("TorchTitan's stock loader only wraps")
    # "c4_test" is the stock entry that reads a local folder.
    config = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=job.corpus)
    loader = config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=job.tokenizer),
        seq_len=SEQ_LEN,
        local_batch_size=job.batch,
        snapshot_every_n_steps=500,  # what the trainer passes for a checkpoint every 500 steps
    )
    return Peer(iter(loader), lambda batch: 1.0, loader.state_dict, loader.load_state_dict)


# --- Zephon 0.2.0 ---------------------------------------------------------------------------------

ZEPHON_SETTINGS: dict[str, dict[str, Any]] = {
    "inline": {"runner": "inline"},
    "mtp": {"mtp_mode": True, "mtp_auto_checkpoint": False},
    "threads": {},
}
"""Its ways to run; the first takes the least CPU time for a token, the second the least time."""


class ByteTokenizer:
    """One token a byte, in the form that Zephon takes a tokenizer in: the cheapest there is."""

    name_or_path = "bytes"
    pad_token = eos_token = "<eos>"
    bos_token_id = eos_token_id = pad_token_id = 256

    def __call__(self, texts: Any, **settings: Any) -> dict[str, list[np.ndarray]]:
        return {"input_ids": [byte_ids(text) for text in texts]}

    def __len__(self) -> int:
        return 257


def byte_ids(text: str) -> np.ndarray:
    """The bytes of a text as int32 token ids."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def _zephon(job: Job, scratch: Path) -> Peer:
    """Zephon 0.2.0: one lane unless the job asks for more, samples in the order of the file."""
    from zephon import Pipeline
    from zephon.io import Dataset
    from zephon.work import MixtureSpec, StaticMixtureWorkSource

    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("corpus", job.corpus)],
        mixture=MixtureSpec({"corpus": 1.0}),
        chunk_size=job.options.get("chunk_size", 512),
        seed=42,
        exhausted_policy="repeat",
    )
    tokenizer: dict[str, Any] = {"tokenizer_id": job.tokenizer}
    if job.backend == "bytes":
        tokenizer = {"tokenizer": ByteTokenizer()}
    packing: dict[str, Any] = {"algorithm": job.packing}
    if job.packing != "wrap":
        packing |= {"num_bins": OPEN_BINS, "pad_token_id": 0}
    documents = Pipeline(source)
    if job.fmt == "tokens-parquet":
        packing["tokens_field"] = "input_ids"
    else:
        documents = documents.decode_text().tokenize(
            field="text", add_attention_mask=False, **tokenizer
        )
    pipeline = (
        documents.pack_flat(max_length=SEQ_LEN + 1, **packing)
        .shuffle(buffer_size=job.buffer_size)
        .batch(microbatch_size=job.batch)
        .options(
            canonical_replicas=job.lanes or 1,
            auto_validation="off",  # a check of the user's operators before the first batch
            **ZEPHON_SETTINGS[job.options.get("mode", "inline")],
        )
    )
    return Peer(
        batches=(
            batch.to_training(return_labels=True, exclude_fields=("ids", "texts"))
            for batch in pipeline
        ),
        fill=lambda batch: float(np.mean(np.asarray(batch["labels"]) != -100)),
        state=pipeline.checkpoint,
        resume=pipeline.restore,
    )


# --- Grain ----------------------------------------------------------------------------------------


class JsonLines:
    """Random access to the lines of JSONL shards, which Grain has no source for."""

    def __init__(self, folder: str):
        self._maps = []
        for path in sorted(Path(folder).rglob("*.jsonl")):
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._places = []
        for index, data in enumerate(self._maps):
            ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10) + 1
            starts = np.concatenate([[0], ends[:-1]])
            self._places.append(np.column_stack([np.full(len(ends), index), starts, ends]))
        self._table = np.concatenate(self._places)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        shard, start, end = self._table[index].tolist()
        return json.loads(self._maps[shard][start:end])


def _grain(job: Job, scratch: Path) -> Peer:
    """Grain's own packing; the user brings reading of JSONL and the tokenizer, so we bring both."""
    import grain
    from grain.experimental import (
        ConcatThenSplitIterDataset,
        FirstFitPackIterDataset,
        ParquetIterDataset,
        RepeatIterDataset,
        WindowShuffleIterDataset,
    )

    encode = _encoder(job)

    def tokenize(record: dict[str, Any]) -> dict[str, np.ndarray]:
        if job.fmt == "tokens-parquet":
            return {"tokens": np.asarray(record["input_ids"], dtype=np.int32)}
        return {"tokens": encode(record["text"])}

    if job.fmt != "jsonl":
        paths = [str(path) for path in sorted(Path(job.corpus).glob("*.parquet"))]
        documents = RepeatIterDataset(ParquetIterDataset(paths)).map(tokenize)
    else:
        options = grain.ReadOptions(num_threads=job.threads, prefetch_buffer_size=64)
        shuffled: Any = grain.MapDataset.source(JsonLines(job.corpus)).seed(42).shuffle()
        documents = shuffled.repeat().map(tokenize).to_iter_dataset(options)
    row = {"tokens": SEQ_LEN + 1}
    if job.packing == "wrap":
        rows: Any = ConcatThenSplitIterDataset(documents, length_struct=row)
    else:
        documents = documents.filter(lambda document: len(document["tokens"]) <= SEQ_LEN + 1)
        rows = FirstFitPackIterDataset(documents, length_struct=row, num_packing_bins=OPEN_BINS)
    shuffled_rows = WindowShuffleIterDataset(rows, window_size=job.buffer_size, seed=0)
    iterator = iter(shuffled_rows.batch(job.batch))
    return Peer(
        batches=iterator,
        fill=lambda batch: float(np.mean(batch["tokens_segment_ids"] != 0)),
        state=iterator.get_state,
        resume=iterator.set_state,
    )


def _encoder(job: Job) -> Callable[[str], np.ndarray]:
    """A text to its token ids with BOS and EOS, by the library that the job names."""
    if job.backend == "bytes":
        return byte_ids
    from torchtitan_zephon.ops.tokenize import load_tokenizer
    from torchtitan_zephon.recipe import TokenizerConfig

    encode = load_tokenizer(TokenizerConfig(path=job.tokenizer), job.backend).encode
    return lambda text: encode([text])[0]


def take(batches: Iterator[Any], count: int) -> list[Any]:
    """The next ``count`` batches."""
    return list(itertools.islice(batches, count))
