"""A lane: one logical stream of sequences, made a segment at a time from a small cursor."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_zephon.ops.documents import Packer, Reference, Rows
from torchtitan_zephon.ops.mix import Mixture
from torchtitan_zephon.sources.feed import Block
from torchtitan_zephon.sources.storage import SourceError

_MOST_DRAWN = 1000  # tokens drawn for each place of a segment, before it is a fault


class StateError(ValueError):
    """A saved state that cannot be gone on from: says which entry, and why."""


@dataclass(frozen=True)
class Cursor:
    """Where a lane stands at the start of a segment; all it takes to make everything after it."""

    lane: int
    segment: int = 0
    positions: tuple[tuple[str, tuple[int, int, int, int]], ...] = ()
    """For each dataset by name: chunk ordinal, block, row, tokens drawn so far."""
    unfinished: tuple[tuple[Reference, ...], ...] = ()
    """Unfinished work by reference, row by row, as the packer's ``flush`` returned it."""
    left_out: tuple[tuple[int, int], ...] = ()
    """For each dataset, documents so far that held nothing to predict, and that were filtered."""
    trained: int = 0
    """Tokens so far that went into rows: with those ``unfinished`` and ``dropped``, all drawn."""
    padding: int = 0
    """Places padded so far."""
    dropped: int = 0
    """Tokens so far of long documents that were dropped, as ``long_documents`` asks for."""
    phase: int = 0
    """Which phase of the mixture the lane is in."""
    base: tuple[int, ...] = ()
    """For each dataset, tokens drawn before the phase began."""

    def to_json(self) -> str:
        """A line that a person can read, with a check sum behind it."""
        entry: dict[str, Any] = {
            "lane": self.lane,
            "segment": self.segment,
            "positions": {name: list(at) for name, at in self.positions},
            "unfinished": [[list(r) for r in row] for row in self.unfinished],
            "left_out": [list(counts) for counts in self.left_out],
            "trained": self.trained,
            "padding": self.padding,
            "dropped": self.dropped,
            "phase": self.phase,
            "base": list(self.base),
        }
        entry["check"] = _check_sum(entry)
        return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: Any, lane: int) -> "Cursor":
        """The cursor of ``lane`` from its entry in a checkpoint.

        Raises:
            StateError: the entry is damaged or belongs to another lane.
        """
        try:
            entry = json.loads(text)
            check = entry.pop("check")
            if check != _check_sum(entry):
                raise ValueError("its check sum does not match")
            if entry["lane"] != lane:
                raise ValueError(f"it belongs to lane {entry['lane']}")
            return cls(
                lane=lane,
                segment=entry["segment"],
                positions=tuple((n, tuple(at)) for n, at in entry["positions"].items()),
                unfinished=tuple(tuple(Reference(*r) for r in row) for row in entry["unfinished"]),
                left_out=tuple((empty, filtered) for empty, filtered in entry["left_out"]),
                trained=entry["trained"],
                padding=entry["padding"],
                dropped=entry["dropped"],
                phase=entry["phase"],
                base=tuple(entry["base"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"the checkpoint's entry for lane {lane} is damaged: {error}; resume from another "
                f"checkpoint. It reads {str(text)[:80]!r}"
            ) from error


def _check_sum(entry: dict[str, Any]) -> str:
    text = json.dumps(entry, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Lane:
    """Makes segment after segment of one lane, from a cursor on."""

    def __init__(self, mixture: Mixture, packer: Packer, cursor: Cursor, endless: bool):
        self.cursor = cursor
        """Where the next segment starts."""
        self.feeds = mixture.feeds
        """What the lane draws from, one for each dataset."""
        self._mixture = mixture
        self._endless = endless
        self._packer = packer
        self._restored = False

    def produce(self, rows: int) -> Rows:
        """The next segment's rows; fewer than ``rows`` only where the data ends."""
        if not self._restored:
            # Open rows hold stretches of hundreds of documents, from a handful of blocks.
            blocks: dict[tuple[int, int, int], Block] = {}
            self._packer.restore(
                [[(r, self._stretch(r, blocks)) for r in row] for row in self.cursor.unfinished]
            )
            self._restored = True
        packer, mixture = self._packer, self._mixture
        packer.begin(rows)
        start, places = sum(f.position.tokens for f in self.feeds), packer.wanted()
        while not packer.full:
            documents = mixture.window(packer.wanted())
            if documents is None:
                if self._endless:
                    raise SourceError(
                        f"lane {self.cursor.lane}: the datasets of phase {mixture.phase} have had "
                        "their passes, while others are endless; give them more passes, or none"
                    )
                packer.close()
                break
            mixture.advance(documents, packer.push(documents))
            drawn = sum(feed.position.tokens for feed in self.feeds) - start
            # Where nearly all is dropped, a search for what fits must become an error.
            if not packer.full and drawn > _MOST_DRAWN * (places + 1):
                raise SourceError(
                    f"lane {self.cursor.lane}: {drawn:,} tokens were drawn for a segment of {rows} "
                    "rows that is still not full: nearly all documents are longer than a row, and "
                    "zephon.packing.long_documents = 'drop' leaves them out"
                )
        made = packer.take()
        before = self.cursor
        self.cursor = Cursor(
            lane=before.lane,
            segment=before.segment + 1,
            positions=tuple(
                (f.dataset.name, (p.ordinal, p.block, p.row, p.tokens))
                for f in self.feeds
                for p in (f.position,)
            ),
            unfinished=tuple(tuple(row) for row in packer.flush()),
            left_out=tuple((f.empty, f.filtered) for f in self.feeds),
            trained=before.trained + int((made.pieces[:, 7] - made.pieces[:, 6]).sum()),
            padding=before.padding + made.padding,
            dropped=before.dropped + made.dropped,
            phase=mixture.phase,
            base=mixture.base,
        )
        return made

    def _stretch(
        self, reference: Reference, blocks: dict[tuple[int, int, int], Block]
    ) -> np.ndarray:
        """The token ids of a referenced stretch of a document, one more than its pairs."""
        feed = self.feeds[reference.dataset]
        key = reference[:3]
        if key not in blocks:
            blocks[key] = feed.read(reference.ordinal, reference.block)
        block = blocks[key]
        document = np.empty(0, dtype=np.int32)
        if reference.row < len(block):
            document = block.document(reference.row)
        if reference.stop >= len(document):
            raise StateError(
                f"lane {self.cursor.lane}: the checkpoint refers to tokens up to {reference.stop} "
                f"of a document of dataset {feed.dataset.name!r} that has {len(document)} now; the "
                "data changed since it was saved"
            )
        return document[reference.start : reference.stop + 1].copy()
