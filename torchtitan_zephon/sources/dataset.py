"""A dataset: its catalogue of shards, cut into numbered chunks of text blocks."""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchtitan_zephon.order import derive_key
from torchtitan_zephon.recipe import DatasetConfig
from torchtitan_zephon.sources import arrow, jsonl, parquet
from torchtitan_zephon.sources.storage import (
    COMPRESSED,
    Field,
    Shard,
    SourceError,
    find_shards,
    read_range,
)

_FORMATS = {"jsonl": jsonl, "parquet": parquet, "arrow": arrow}
_HASHED_WHOLE = 1 << 24  # bytes up to which a dataset's contents are hashed, not a sample of them
_SAMPLE_BLOCKS = 64
_SAMPLE_BYTES = 1 << 14  # bytes a sampled block: 1 MiB in all, for every rank reads them


class Dataset:
    """One dataset of a recipe, cut for ``lanes`` lanes.

    Chunk ``i`` is a contiguous piece of one shard; which one follows from the shards' sizes alone,
    so opening a dataset lists its files and reads none of them. Blocks hold the texts under the
    dataset's ``text_field``, or the int32 arrays under its ``tokens_field``, or, with
    ``whole_records``, the records as dicts.

    Raises:
        SourceError: when the path holds no data that can be read.
    """

    def __init__(self, config: DatasetConfig, lanes: int, whole_records: bool = False):
        self.name = config.name
        self.wanted = Field(config.tokens_field or config.text_field, bool(config.tokens_field))
        """What documents are made of."""
        self._field = None if whole_records else self.wanted
        known = tuple(s for f in _FORMATS.values() for s in f.SUFFIXES)
        suffixes = known if config.format == "auto" else _FORMATS[config.format].SUFFIXES
        self.fs, self.shards = find_shards(config.path, suffixes)
        self.format = _format_of(config, self.shards)
        self._reader: Any = _FORMATS[self.format]
        sizes = np.array([s.size for s in self.shards], dtype=np.int64)
        self.bytes = int(sizes.sum())
        self.chunk_bytes: int = self._reader.chunk_bytes(self.bytes, lanes)
        self._counts = -(-sizes // self.chunk_bytes)
        self._ends = np.cumsum(self._counts)
        self.num_chunks = int(self._ends[-1])

    def blocks(self, chunk: int, start: int = 0) -> Iterator[list[Any]]:
        """A chunk, block by block from block ``start`` on; the same at every call."""
        shard, part, parts = self.place_of(chunk)
        blocks = self._reader.read_blocks(
            self.fs, shard, part, parts, self.chunk_bytes, self._field
        )
        return itertools.islice(blocks, start, None)

    def place_of(self, chunk: int) -> tuple[Shard, int, int]:
        """The shard of a chunk, which chunk of the shard it is, and how many the shard has."""
        index = int(np.searchsorted(self._ends, chunk, side="right"))
        count = int(self._counts[index])
        return self.shards[index], chunk - int(self._ends[index]) + count, count

    def first(self, limit: int) -> list[Any]:
        """Up to ``limit`` texts, arrays or records, from the beginning of the dataset.

        Raises:
            SourceError: if no shard holds a document.
        """
        for chunk in range(self.num_chunks):
            for texts in self.blocks(chunk):
                if texts:
                    return texts[:limit]
        raise SourceError(f"dataset {self.name!r}: its {len(self.shards)} shards hold no document")

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: shards with sizes, and a hash of (a sample of) their bytes.

        Up to 16 MiB are hashed whole; of more, 64 blocks of 16 KiB at places spread over the
        dataset, so that the cost does not grow with it.
        """
        catalogue = hashlib.sha256()
        for shard in self.shards:
            catalogue.update(f"{shard.name}\0{shard.size}\n".encode("utf-8", "surrogateescape"))
        return {
            "format": self.format,
            "tokens_field" if self.wanted.tokens else "text_field": self.wanted.name,
            "shards": len(self.shards),
            "bytes": self.bytes,
            "catalogue": catalogue.hexdigest(),
            "content": self._content_digest(),
        }

    def _content_digest(self) -> str:
        starts = np.concatenate([[0], np.cumsum([s.size for s in self.shards])])
        digest = hashlib.sha256()
        for at, left in self._sample():
            index = int(np.searchsorted(starts, at, side="right")) - 1
            while left > 0:
                offset = at - int(starts[index])
                data = read_range(self.fs, self.shards[index], offset, offset + left)
                digest.update(data)
                at, left, index = at + len(data), left - len(data), index + 1
        return digest.hexdigest()

    def _sample(self) -> list[tuple[int, int]]:
        """Places and lengths of what is hashed, in bytes of all shards laid end to end."""
        if self.bytes <= _HASHED_WHOLE:
            return [(0, self.bytes)]
        stride = self.bytes // _SAMPLE_BLOCKS
        # Each block lies at a keyed place in its stretch: an edit that repeats at a regular
        # distance would otherwise be missed for ever.
        return [
            (
                number * stride
                + derive_key("content sample", number) % (stride - _SAMPLE_BYTES + 1),
                _SAMPLE_BYTES,
            )
            for number in range(_SAMPLE_BLOCKS)
        ]


def _format_of(config: DatasetConfig, shards: list[Shard]) -> str:
    for shard in shards:
        if shard.path.endswith(COMPRESSED):
            raise SourceError(
                f"path {config.path!r}: {shard.name!r} is compressed; compressed shards cannot be "
                "cut into chunks: unpack them, or convert them to Parquet"
            )
    if config.format != "auto":
        return config.format
    formats = {
        name: shard.name
        for shard in shards
        for name, module in _FORMATS.items()
        if shard.path.endswith(module.SUFFIXES)
    }
    if len(formats) == 1:
        return next(iter(formats))
    if formats:
        raise SourceError(
            f"path {config.path!r}: files of several formats "
            f"({', '.join(repr(n) for n in formats.values())}); set format"
        )
    raise SourceError(
        f"path {config.path!r}: the ending of {shards[0].name!r} names no known format; set format "
        f"to one of {', '.join(_FORMATS)}"
    )
