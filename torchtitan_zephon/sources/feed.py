"""One dataset as one lane sees it: an endless walk over its chunks, from any place in it."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan_zephon.ops.worker import Worker
from torchtitan_zephon.order import derive_key, permute
from torchtitan_zephon.sources.dataset import Dataset
from torchtitan_zephon.sources.storage import SourceError


@dataclass(frozen=True)
class Block:
    """The documents of one block of a chunk, tokenized, in the order in which they are visited."""

    ordinal: int
    """Which chunk of the lane this is, counted over all epochs."""
    number: int
    """Which block of the chunk."""
    tokens: np.ndarray
    """Token ids of all documents in a row, int32 [N]."""
    bounds: np.ndarray
    """Where documents begin and end in ``tokens``, int64 [documents + 1]."""
    empty: int
    """Documents left out because they hold under two tokens, so nothing to predict."""
    filtered: int = 0
    """Records that a filter left out."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def pairs(self) -> np.ndarray:
        """(input, label) pairs before each document, and behind the last, int64 [documents + 1]."""
        return self.bounds - np.arange(len(self.bounds))

    def document(self, row: int) -> np.ndarray:
        """Token ids of one document, int32 [n]."""
        return self.tokens[self.bounds[row] : self.bounds[row + 1]]


@dataclass
class Position:
    """Where a lane stands in a dataset: plain integers, saved in checkpoints."""

    ordinal: int = 0
    block: int = 0
    row: int = 0
    """Documents of the block that are behind."""
    tokens: int = 0
    """Tokens drawn from the dataset so far: (input, label) pairs."""


@dataclass(frozen=True)
class Walk:
    """The endless walk of one lane over a dataset, as a function of where it starts.

    Position ``k`` of the walk is position ``lane + k * lanes`` of the endless list of epochs.
    """

    dataset: Dataset
    lane: int
    lanes: int
    seed: int
    random_order: bool
    """Whether chunks, and documents inside a block, are visited in keyed random order."""
    passes: int | None
    """Epochs that are wanted; None for any number."""
    endless: bool
    """Whether the walk goes on beyond the epochs that are wanted."""
    worker: Worker

    def blocks(self, ordinal: int, number: int) -> Iterator[Block]:
        """The blocks from number ``number`` of chunk ``ordinal`` on.

        Raises:
            SourceError: there is nothing to train on in the dataset.
        """
        name, chunks = self.dataset.name, self.dataset.num_chunks
        barren, keyed = 0, -1
        chunk_key = document_key = 0
        while True:
            epoch, index = divmod(self.lane + ordinal * self.lanes, chunks)
            if not self.endless and self.passes is not None and epoch >= self.passes:
                return
            chunk = index
            if self.random_order:
                if keyed != epoch:
                    keyed = epoch
                    chunk_key = derive_key(self.seed, "chunks", name, epoch)
                    document_key = derive_key(self.seed, "documents", name, epoch)
                chunk = permute(index, chunks, chunk_key)
            shard = self.dataset.place_of(chunk)[0].path
            for records in self.dataset.blocks(chunk, number):
                key = None
                if self.random_order:
                    key = derive_key(chunk, number, key=document_key)
                place = f"dataset {name!r}, block {number} of chunk {chunk} in {shard}"
                made = self.worker(records, place, key)
                del records  # this generator would hold the texts as long as the block is used
                block = Block(ordinal, number, made.tokens, made.bounds, made.empty, made.filtered)
                barren = 0 if len(block) else barren + 1
                yield block
                number += 1
            barren += 1
            # By chance alone a lane misses the one good chunk of a dataset this often less than
            # once in e**20 cases; an endless search must become an error.
            if barren > 1000 + 40 * chunks:
                raise SourceError(
                    f"dataset {name!r}: {barren} chunks in a row gave no document of two tokens or "
                    "more; remove the dataset, or check its text_field or tokens_field"
                )
            ordinal, number = ordinal + 1, 0


class Feed:
    """The documents of a walk, in order, from ``position`` on.

    With an ``executor`` the next block is read and tokenized there while the current one is used;
    the documents are the same.
    """

    def __init__(
        self,
        walk: Walk,
        position: Position,
        left_out: tuple[int, int] = (0, 0),
        executor: Executor | None = None,
    ):
        self.dataset = walk.dataset
        self.position = position
        self.empty, self.filtered = left_out
        """Documents behind that held nothing to predict, and records that a filter left out."""
        self.walk = walk
        # Of the walk, not of this feed: a generator that held its feed would make a cycle, which
        # TorchTitan, with the garbage collector off, would keep for ever.
        self._blocks = walk.blocks(position.ordinal, position.block)
        self._executor = executor
        self._ahead: Future[Block | None] | None = None
        self._block: Block | None = None
        self._ended = False

    def block(self) -> Block | None:
        """The block that ``position`` is in, with at least one unread document; None at the end."""
        while not self._ended:
            block = self._block
            if block is not None:
                if self.position.row < len(block):
                    return block
                self.empty += block.empty
                self.filtered += block.filtered
                self.position.row = 0
            block = self._next()
            if block is None:
                if self._block is not None:
                    # Behind the last block, lest a walk from here read it again.
                    self.position.ordinal, self.position.block = self._block.ordinal + 1, 0
                self._ended, self._block = True, None
                break
            if self._block is None:
                there = (block.ordinal, block.number) == self._place()
                if self.position.row > (len(block) if there else 0):
                    raise SourceError(
                        f"dataset {self.dataset.name!r}, lane {self.walk.lane}: the checkpoint "
                        f"stands at document {self.position.row} of a block that has "
                        f"{len(block) if there else 0} now; the data changed since it was saved"
                    )
            self._block = block
            self.position.ordinal, self.position.block = block.ordinal, block.number
        return None

    def has_had_its_passes(self) -> bool:
        """Whether every document was seen as often as is wanted; never where any number is."""
        walk = self.walk
        if walk.passes is None:
            return False
        return self.block() is None or (
            (walk.lane + self.position.ordinal * walk.lanes) // walk.dataset.num_chunks
            >= walk.passes
        )

    def read(self, ordinal: int, number: int) -> Block:
        """Any block of the walk again, for what a cursor refers to.

        Raises:
            SourceError: there is no such block any more.
        """
        if self._block is not None and (ordinal, number) == (
            self._block.ordinal,
            self._block.number,
        ):
            return self._block
        block = next(self.walk.blocks(ordinal, number), None)
        if block is None or (block.ordinal, block.number) != (ordinal, number):
            raise SourceError(
                f"dataset {self.dataset.name!r}, lane {self.walk.lane}: block {number} of chunk "
                f"{ordinal}, where the checkpoint stands, is not there any more; the data changed"
            )
        return block

    def _place(self) -> tuple[int, int]:
        return self.position.ordinal, self.position.block

    def _next(self) -> Block | None:
        if self._executor is None:
            return next(self._blocks, None)
        ahead = self._ahead or self._executor.submit(next, self._blocks, None)
        block = ahead.result()
        # One block ahead at most, so the walk is never run by two threads at a time.
        self._ahead = self._executor.submit(next, self._blocks, None) if block is not None else None
        return block
