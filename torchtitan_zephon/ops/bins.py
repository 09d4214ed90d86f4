"""Packing into open rows: ``first_fit``, ``best_fit``, ``best_fit_wrap`` and ``none``."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from torchtitan_zephon.ops.documents import Documents, Reference, Rows
from torchtitan_zephon.recipe import DatasetConfig, PackingConfig

# The open rows of a group are a sorted list of ``room << _AGE_BITS | age``: the fullest row is its
# first, the oldest on a tie, and one bisection finds where the rows with enough room begin.
_AGE_BITS = 40
_AGE = (1 << _AGE_BITS) - 1


def groups_of(config: PackingConfig, datasets: tuple[DatasetConfig, ...]) -> list[int]:
    """For each dataset the number of its group: only datasets of one group may share a row."""
    names = {
        "off": [""] * len(datasets),
        "group": [d.group for d in datasets],
        "full": [d.name for d in datasets],
    }[config.homogeneous]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


class Bins:
    """Puts documents into up to ``open_bins`` open rows, whole wherever they fit.

    ``first_fit`` takes the oldest open row with room, ``best_fit`` the one with the least room, the
    oldest on a tie. Where a document fits nowhere and no more rows may be opened, the fullest row
    (the oldest on a tie) is finished with padding. ``best_fit_wrap`` is ``best_fit`` that finishes
    that row with the document's head instead, and then places the remainder. ``none`` finishes
    every row with its first document.

    A row is finished as soon as it is full or holds ``max_documents`` pieces. Rows of all groups
    count for ``open_bins``: for a document whose group has no row, and may open none, the fullest
    row of any group is finished with padding. A document of a row or more fills rows of its own,
    and its remainder is placed like any other, unless ``long_documents`` has it dropped.

    Args:
        config: the settings; ``algorithm`` is not ``wrap``.
        seq_len: pairs a row.
        pad_id: token id of padding.
        groups: for each dataset the number of its group, as from ``groups_of``.
    """

    def __init__(self, config: PackingConfig, seq_len: int, pad_id: int, groups: list[int]):
        if config.algorithm == "wrap":
            raise ValueError("algorithm = 'wrap': keeps no rows open; Wrap packs it")
        self.full = False
        self._seq_len, self._pad_id = seq_len, pad_id
        self._oldest_first = config.algorithm == "first_fit"
        self._splits = config.algorithm == "best_fit_wrap"
        self._max_documents = 1 if config.algorithm == "none" else config.max_documents
        self._long_documents = config.long_documents
        self._open_bins = config.open_bins
        self._groups = np.array(groups, dtype=np.int64)
        self._keys: list[list[int]] = [[] for _ in range(max(groups) + 1)]
        self._open: dict[int, _Row] = {}  # by age, so the oldest first
        self._age = 0
        self._rest = _Row()  # what waits for a place, as no row of a segment was left to fill
        self._segment = _Segment()
        self._done: list[_Row] = []
        self._rows = self._dropped = 0

    def begin(self, rows: int) -> None:
        self._rows, self._done, self._dropped, self.full = rows, [], 0, False
        self._segment = _Segment()
        rest, self._rest = self._rest, _Row()
        for i, (reference, tokens) in enumerate(zip(rest.references, rest.tokens, strict=True)):
            if self.full:
                self._rest.references += rest.references[i:]
                self._rest.tokens += rest.tokens[i:]
                break
            place = np.array([reference[:4]], dtype=np.int64)
            bounds = np.array([0, len(tokens)], dtype=np.int64)
            number = self._segment.append(Documents(tokens, bounds, place), reference.start)
            group = int(self._groups[reference.dataset])
            if len(tokens) - 1 < self._seq_len:
                self._place(number, len(tokens) - 1, group)
            else:
                self._divide(number, len(tokens) - 1, group)

    def wanted(self) -> int:
        return (self._rows - len(self._done)) * self._seq_len

    def push(self, documents: Documents) -> int:
        seq_len, place, first = self._seq_len, self._place, self._segment.count
        sizes = (np.diff(documents.bounds) - 1).tolist()
        groups = self._groups[documents.places[:, 0]].tolist()
        used = 0
        for size, group in zip(sizes, groups, strict=True):
            if self.full:
                break
            if size < seq_len:
                place(first + used, size, group)
            elif size == seq_len or self._long_documents == "split":
                self._divide(first + used, size, group)
            else:
                kept = seq_len if self._long_documents == "truncate" else 0
                self._dropped += size - kept
                if kept:
                    self._finish(_Row([self._segment.cut(first + used, 0, kept)]))
            used += 1
        end = documents.bounds[used]
        self._segment.append(
            Documents(documents.tokens[:end], documents.bounds[: used + 1], documents.places[:used])
        )
        return used

    def _place(self, number: int, size: int, group: int) -> None:
        """Place a piece that is shorter than a row."""
        keys = self._keys[group]
        at = bisect_left(keys, size << _AGE_BITS)
        if at < len(keys):
            if self._oldest_first:
                at = _oldest(keys, at)
            key = keys.pop(at) - (size << _AGE_BITS)
            row = self._open[key & _AGE]
            row.fresh.append(number)
            if key > _AGE and not (self._max_documents and len(row) == self._max_documents):
                insort(keys, key)
            else:
                self._finish(self._open.pop(key & _AGE))
        elif len(self._open) < self._open_bins:
            self._open_row(_Row([number]), size, keys)
        elif self._splits and keys:
            self._divide(number, size, group)
        else:
            fullest = min(keys[0] for keys in self._keys if keys)
            self._finish(self._forget(fullest & _AGE))
            self._open_row(_Row([number]), size, keys)

    def _divide(self, number: int, size: int, group: int) -> None:
        """Place what goes nowhere whole: a head that finishes a row, whole rows, what remains."""
        document, start, stop = self._segment.stretch(number, size)
        keys = self._keys[group]
        if self._splits and keys and len(self._open) == self._open_bins:
            key = keys.pop(0)
            row = self._open.pop(key & _AGE)
            middle = start + (key >> _AGE_BITS)
            row.fresh.append(self._segment.cut(document, start, middle))
            self._finish(row)
            start = middle
        while stop - start >= self._seq_len and not self.full:
            middle = start + self._seq_len
            self._finish(_Row([self._segment.cut(document, start, middle)]))
            start = middle
        if start == stop:
            return
        remains = self._segment.cut(document, start, stop)
        if self.full:
            self._rest.fresh.append(remains)
        else:
            self._place(remains, stop - start, group)

    def _open_row(self, row: "_Row", size: int, keys: list[int]) -> None:
        if self._max_documents == 1:
            self._finish(row)
            return
        self._open[self._age] = row
        insort(keys, (self._seq_len - size) << _AGE_BITS | self._age)
        self._age += 1

    def _forget(self, age: int) -> "_Row":
        for keys in self._keys:
            keys[:] = [key for key in keys if key & _AGE != age]
        return self._open.pop(age)

    def _finish(self, row: "_Row") -> None:
        self._done.append(row)
        self.full = len(self._done) >= self._rows

    def close(self) -> None:
        while self._open and not self.full:
            self._finish(self._forget(next(iter(self._open))))

    def take(self) -> Rows:
        rows, seq_len, segment = self._done, self._seq_len, self._segment
        # What waits when the segment ends is copied, lest a stretch keep its whole block in memory.
        waiting = [row for row in (self._rest, *self._open.values()) if row.fresh]
        waited = [stretch for row in rows for stretch in row.tokens]
        # All there is, end to end: this segment's documents, what waited for it, a row of padding.
        tokens = np.concatenate(
            [*segment.tokens, *waited, np.full(seq_len, ~self._pad_id, dtype=np.int32)]
        )
        places, begins = segment.locate([n for row in (*rows, *waiting) for n in row.fresh])
        fresh = sum(len(row.fresh) for row in rows)
        self._keep(waiting, places[fresh:], begins[fresh:], tokens)
        self._done, self._segment = [], _Segment()
        old = np.fromiter(chain.from_iterable(r for row in rows for r in row.references), np.int64)
        lengths = np.cumsum([0, *map(len, waited)])
        old_begins = len(tokens) - seq_len - lengths[-1] + lengths[:-1]
        places = np.concatenate([old.reshape(-1, 6), places[:fresh]])
        sizes = places[:, 5] - places[:, 4]
        numbers = np.arange(len(rows))
        owner = np.repeat(
            np.append(numbers, numbers),
            [len(r.references) for r in rows] + [len(r.fresh) for r in rows],
        )
        padding = seq_len - np.bincount(owner, sizes, len(rows)).astype(np.int64)
        # Runs, in the order of the rows: the pieces that waited, the fresh, padding (maybe none).
        owner = np.append(owner, numbers)
        order = np.argsort(owner, kind="stable")
        begins = np.concatenate(
            [old_begins, begins[:fresh], np.full(len(rows), len(tokens) - seq_len)]
        )[order]
        owner, sizes = owner[order], np.append(sizes, padding)[order]
        ends, starts = begins + sizes, np.cumsum(sizes) - sizes
        runs = zip(begins.tolist(), ends.tolist(), strict=True)
        filled = np.concatenate([tokens[:0], *(tokens[a:b] for a, b in runs)])
        pieces = np.flatnonzero(order < len(places))
        owner = owner[pieces]
        columns = starts[pieces] - owner * seq_len
        return Rows(
            filled.reshape(-1, seq_len),
            np.column_stack([owner, columns, places[order[pieces]]]),
            tokens[ends[pieces]],
            self._dropped,
        )

    def _keep(
        self, waiting: list["_Row"], places: np.ndarray, begins: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Turn the fresh pieces of rows, found at ``begins`` of ``tokens``, into kept ones."""
        references = map(Reference._make, places.tolist())
        ends = begins + places[:, 5] - places[:, 4] + 1
        copies = (tokens[a:b].copy() for a, b in zip(begins.tolist(), ends.tolist(), strict=True))
        for row in waiting:
            row.references += islice(references, len(row.fresh))
            row.tokens += islice(copies, len(row.fresh))
            row.fresh = []

    def flush(self) -> list[list[Reference]]:
        # What waits for a place goes first, as a row of its own that may well be empty.
        rest, *bins = (list(row.references) for row in (self._rest, *self._open.values()))
        return [rest, *bins] if rest or bins else []

    def restore(self, unfinished: list[list[tuple[Reference, np.ndarray]]]) -> None:
        for keys in self._keys:
            keys.clear()
        self._open, self._age, self._rest = {}, 0, _Row()
        for number, pieces in enumerate(unfinished):
            row = _Row([], [reference for reference, _ in pieces], [part for _, part in pieces])
            size = sum(len(part) - 1 for part in row.tokens)
            groups = {int(self._groups[reference.dataset]) for reference in row.references}
            if number > 0 and self._may_be_open(row, size, groups):
                self._open_row(row, size, self._keys[groups.pop()])
            else:
                self._rest.references += row.references
                self._rest.tokens += row.tokens

    def _may_be_open(self, row: "_Row", size: int, groups: set[int]) -> bool:
        """False for a row that only other settings leave open, which a resume may have accepted."""
        return (
            size < self._seq_len
            and len(groups) == 1
            and len(self._open) < self._open_bins
            and not 0 < self._max_documents <= len(row)
        )


def _oldest(keys: list[int], at: int) -> int:
    """Index of the key of the oldest row among those from ``at`` on."""
    if len(keys) - at == 1:
        return at
    return keys.index(min(keys[at:], key=_AGE.__and__), at)


@dataclass(slots=True)
class _Row:
    """The pieces of a row: those that waited from segments before, and behind them the fresh."""

    fresh: list[int] = field(default_factory=list)
    """Numbers in the segment."""
    references: list[Reference] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    """Of each reference, one more than its pairs."""

    def __len__(self) -> int:
        return len(self.references) + len(self.fresh)


class _Segment:
    """The pieces that came in a segment, by number: documents from 0 on, cuts of them from -1 down.

    What is appended first may itself be a stretch that begins with pair ``first`` of a document.
    """

    def __init__(self):
        self.count = 0
        self.tokens: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
        self._lengths: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        self._places: list[np.ndarray] = [np.empty((0, 4), dtype=np.int64)]
        self._firsts: list[int] = []
        self._cuts: list[tuple[int, int, int]] = []

    def append(self, documents: Documents, first: int = 0) -> int:
        """Add documents; the number of the first of them."""
        self.tokens.append(documents.tokens)
        self._lengths.append(np.diff(documents.bounds))
        self._places.append(documents.places)
        if first:
            self._firsts += [0] * (self.count - len(self._firsts)) + [first]
        self.count += len(documents)
        return self.count - len(documents)

    def stretch(self, number: int, size: int) -> tuple[int, int, int]:
        """Document, first pair and pair behind the last of a piece of ``size`` pairs."""
        return (number, 0, size) if number >= 0 else self._cuts[~number]

    def cut(self, document: int, start: int, stop: int) -> int:
        """The number of a stretch of a document of this segment, which may not be appended yet."""
        self._cuts.append((document, start, stop))
        return -len(self._cuts)

    def locate(self, numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """References of pieces, int64 [n, 6], and where in ``tokens`` each begins, int64 [n]."""
        wanted = np.array(numbers, dtype=np.int64)
        # Cuts go behind the documents, the last one first: negative indices count from the end.
        cuts = np.array(self._cuts[::-1], dtype=np.int64).reshape(-1, 3)
        nought = np.zeros(self.count, dtype=np.int64)
        lengths = np.concatenate(self._lengths)
        firsts = nought.copy()
        firsts[: len(self._firsts)] = self._firsts
        document = np.append(np.arange(self.count), cuts[:, 0])[wanted]
        start = np.append(nought, cuts[:, 1])[wanted]
        stop = np.append(lengths - 1, cuts[:, 2])[wanted]
        first = firsts[document]
        places = np.concatenate(self._places)[document]
        references = np.column_stack([places, first + start, first + stop])
        return references, (np.cumsum(lengths) - lengths)[document] + start
