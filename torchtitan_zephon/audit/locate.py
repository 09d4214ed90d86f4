"""From a stretch of a document, as a lane refers to it, back to the record of the shard it is from.

The walk over the dataset is run again over the one block that the document lies in, with what it
reads and what becomes of each record written down on the way, so that the order of chunks and
documents, operators, and the empty documents left out are the engine's own, not a second account.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from torchtitan_zephon.ops.documents import Reference
from torchtitan_zephon.ops.worker import Encoded, Worker
from torchtitan_zephon.sources import arrow, jsonl, parquet
from torchtitan_zephon.sources.dataset import Dataset
from torchtitan_zephon.sources.feed import Walk
from torchtitan_zephon.sources.storage import Shard, SourceError, read_range

_COUNT_LINES_UP_TO = 1 << 30  # bytes read to count the lines in front; beyond that, only the byte


@dataclass(frozen=True)
class Origin:
    """The record that a document was made from."""

    dataset: str
    shard: str
    """Path of the file."""
    record: int | None
    """Line of a JSONL shard, from 1, or row of another, from 0; None far into a JSONL file."""
    byte: int | None
    """Where the line begins, in JSONL."""
    epoch: int
    tokens: int
    """Tokens of the document, BOS and EOS with them."""

    def __str__(self) -> str:
        if self.byte is None:
            return f"{self.shard}, row {self.record}"
        at = f"byte {self.byte}" if self.record is None else f"line {self.record}"
        return f"{self.shard}, {at}"


class _Watched:
    """A dataset that remembers the last block read from it."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self.chunk = self.number = -1
        self.records: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def blocks(self, chunk: int, start: int = 0) -> Iterator[list[Any]]:
        for number, records in enumerate(self._dataset.blocks(chunk, start), start=start):
            self.chunk, self.number, self.records = chunk, number, records
            yield records


class _WatchedWorker:
    """A worker that remembers from which record of the block each of its documents came."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self.records = np.empty(0, dtype=np.int64)
        """For each document, which record of the block as it was read."""
        self.lengths = np.empty(0, dtype=np.int64)
        """Tokens of each document."""

    def __call__(self, records: list[Any], place: str, key: int | None) -> Encoded:
        worker = self._worker
        sources = list(range(len(records)))
        if worker.functions:
            # Record by record, to see what becomes of each; copies, for functions may change them.
            made = [
                worker.apply(worker.functions, [copy.deepcopy(record)], place)[0]
                for record in records
            ]
            sources = [number for number, some in enumerate(made) for _ in some]
        # Numbers in the place of the records show the order in which they are visited.
        order: list[int] = []

        def note(numbers: list[Any]) -> tuple[np.ndarray, np.ndarray]:
            order.extend(numbers)
            return np.empty(0, dtype=np.int32), np.zeros(len(numbers) + 1, dtype=np.int64)

        def encode(documents: list[Any]) -> tuple[np.ndarray, np.ndarray]:
            ids, bounds = worker.encode(documents)
            self.lengths = np.diff(bounds)
            return ids, bounds

        numbering = dataclasses.replace(worker, functions=(), field=None, encode=note)
        numbering(list(range(len(sources))), place, key)
        copies = copy.deepcopy(records) if worker.functions else records
        result = dataclasses.replace(worker, encode=encode)(copies, place, key)
        kept = self.lengths >= 2  # those that have something to predict
        self.records = np.array([sources[i] for i in order], dtype=np.int64)[kept]
        self.lengths = self.lengths[kept]
        return result


class Locator:
    """Finds the origins of documents of one walk; remembers the last block it looked at."""

    def __init__(self, walk: Walk):
        self._dataset = walk.dataset
        self._watched = _Watched(walk.dataset)
        self._worker = _WatchedWorker(walk.worker)
        self._walk = dataclasses.replace(
            walk, dataset=cast(Dataset, self._watched), worker=cast(Worker, self._worker)
        )
        self._at: tuple[int, int] | None = None

    def origin(self, reference: Reference) -> Origin:
        """The record that a document, referred to by any stretch of it, was made from.

        Raises:
            SourceError: there is no such document any more.
        """
        ordinal, number = reference.ordinal, reference.block
        if self._at != (ordinal, number):
            block = next(self._walk.blocks(ordinal, number), None)
            if block is None or (block.ordinal, block.number) != (ordinal, number):
                raise SourceError(f"dataset {self._dataset.name!r}: the data changed since the run")
            self._at = ordinal, number
        place = int(self._worker.records[reference.row])
        watched, walk = self._watched, self._walk
        shard, record, byte = record_in_shard(
            self._dataset, watched.chunk, watched.number, place, watched.records[place]
        )
        return Origin(
            dataset=self._dataset.name,
            shard=shard.path,
            record=record,
            byte=byte,
            epoch=(walk.lane + ordinal * walk.lanes) // self._dataset.num_chunks,
            tokens=int(self._worker.lengths[reference.row]),
        )


def record_in_shard(
    dataset: Dataset, chunk: int, block: int, place: int, value: Any
) -> tuple[Shard, int | None, int | None]:
    """The shard, and in it the record (and for JSONL the byte) of a chunk's ``place``-th value.

    Raises:
        SourceError: that record does not hold ``value``.
    """
    shard, part, chunks = dataset.place_of(chunk)
    if dataset.format == "jsonl":
        record, byte, found = _line(dataset, shard, part, place, value)
    else:
        place += sum(map(len, _first_blocks(dataset, chunk, block)))
        field = None if isinstance(value, dict) else dataset.wanted
        byte, find = None, (arrow if dataset.format == "arrow" else parquet).find_row
        record, found = find(dataset.fs, shard, part, chunks, place, field)
    if not np.array_equal(found, value):
        raise SourceError(
            f"{shard.path}: record {record} is not what the run was given; it changed"
        )
    return shard, record, byte


def _first_blocks(dataset: Dataset, chunk: int, count: int) -> Iterator[list[Any]]:
    for _, records in zip(range(count), dataset.blocks(chunk), strict=False):
        yield records


def _line(
    dataset: Dataset, shard: Shard, part: int, place: int, value: Any
) -> tuple[int | None, int, Any]:
    size = dataset.chunk_bytes
    data, byte = jsonl.whole_lines(dataset.fs, shard, part * size, (part + 1) * size)
    found = None
    for line in data.split(b"\n"):
        if line.strip():
            if place == 0:
                record = json.loads(line)
                found = record if isinstance(value, dict) else record[dataset.wanted.name]
                break
            place -= 1
        byte += len(line) + 1
    if byte > _COUNT_LINES_UP_TO:
        return None, byte, found
    before = sum(
        read_range(dataset.fs, shard, at, min(at + (1 << 24), byte)).count(b"\n")
        for at in range(0, byte, 1 << 24)
    )
    return before + 1, byte, found
