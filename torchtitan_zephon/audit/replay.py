"""Making a past global batch again, from the recipe and the cursors beside the audit log.

Each lane starts from the newest cursor logged at or before the segment that is wanted, so a batch
of any step costs about one segment a lane, not a replay from step 0. What was made is checked
against the digest in the log before anybody is told what is in it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torchtitan_zephon.audit.locate import Locator, Origin
from torchtitan_zephon.audit.log import AuditError, step_sums
from torchtitan_zephon.audit.runs import LoggedStep, Run
from torchtitan_zephon.lane import Cursor, Lane, StateError
from torchtitan_zephon.ops.documents import Reference, Rows, padding_row
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.recipe import Recipe, RecipeError, differences
from torchtitan_zephon.settings import read_table
from torchtitan_zephon.sources.storage import SourceError
from torchtitan_zephon.steps import sequence_digest, step_slice


def recipe_from_settings(settings: dict[str, Any]) -> Recipe:
    """The recipe whose ``dataclasses.asdict`` was written as JSON.

    Raises:
        RecipeError: it was written by a release with other settings.
    """
    faults: list[str] = []
    # A table that may be left out is None in the log; in a table, as in TOML, it is not there.
    given = {name: value for name, value in settings.items() if value is not None}
    recipe = read_table(Recipe, given, "recipe", faults)
    if faults or recipe is None:
        raise RecipeError(faults)
    return recipe


@dataclass(frozen=True)
class Piece:
    """A stretch of one document in a sequence."""

    column: int
    """Where in the sequence it begins."""
    dataset: str
    reference: Reference
    text: str
    """Its input tokens, decoded."""

    @property
    def length(self) -> int:
        """(input, label) pairs."""
        return self.reference.stop - self.reference.start


@dataclass(frozen=True)
class Sequence:
    """One sequence of a past global batch."""

    lane: int
    number: int
    inputs: np.ndarray
    """Token ids, int32 [seq_len]; labels and positions likewise."""
    labels: np.ndarray
    positions: np.ndarray
    pieces: np.ndarray
    """What it is made of, int64 [pieces, 7]: column, and the fields of Reference."""

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the sequence."""
        return sequence_digest(self.inputs, self.labels, self.positions)


@dataclass(frozen=True)
class RebuiltStep:
    """A past global batch, made again."""

    logged: LoggedStep
    sequences: list[Sequence]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the sequences' digests, hex."""
        return hashlib.sha256(b"".join(s.digest for s in self.sequences)).hexdigest()

    @property
    def matches(self) -> bool:
        """Whether it is, byte for byte, what was logged."""
        return self.sha256 == self.logged.sha256

    @cached_property
    def sums(self) -> tuple[int, int]:
        """``step_sums`` of the sequences."""
        return step_sums([s.digest for s in self.sequences])

    def rank_of(self, index: int) -> int:
        """The data-parallel rank that was given the sequence."""
        return index * self.logged.dp_degree // len(self.sequences)


class Replay:
    """Makes past steps of a run again.

    Args:
        run: as the log tells it.
        data: other paths for datasets, by name; the data may have moved since.
        tokenizer: another path of the tokenizer.

    Errors, raised by all methods: ``AuditError`` with one line that says what is missing.
    """

    def __init__(self, run: Run, data: dict[str, str] | None = None, tokenizer: str | None = None):
        self.run = run
        self._data, self._tokenizer = data or {}, tokenizer
        self._pipelines: dict[str, Pipeline] = {}
        self._changes: dict[str, list[str]] = {}
        self._readers: dict[tuple[str, int], LaneReader] = {}
        self._locators: dict[tuple[str, int, int], Locator] = {}

    @cached_property
    def _cursors(self) -> dict[tuple[str, int], dict[int, str]]:
        return self.run.cursors()

    def logged(self, step: int) -> LoggedStep:
        """The line of a step."""
        if step not in self.run.steps:
            known = list(self.run.steps)
            raise AuditError(
                f"{self.run.name}: step {step} is not logged; the log has steps {known[0]} to "
                f"{known[-1]}"
            )
        return self.run.steps[step]

    def pipeline(self, step: int) -> Pipeline:
        """The recipe of a step, made ready to run."""
        name = self.logged(step).recipe
        if name not in self._pipelines:
            described = self.run.recipes.get(name)
            if described is None:
                raise AuditError(f"{self.run.folder}: recipe-{name}.json is not there")
            try:
                recipe = recipe_from_settings(described["settings"])
                pipeline = Pipeline(self._moved(recipe))
                now = json.loads(json.dumps(pipeline.identity))
                self._changes[name] = list(differences(described["identity"], now))
            except RecipeError as error:
                raise AuditError(
                    f"{self.run.name}: the recipe cannot be used here: {'; '.join(error.faults)}"
                ) from error
            except KeyError as error:
                raise AuditError(
                    f"{self.run.folder}/recipe-{name}.json has no {error.args[0]!r}"
                ) from error
            self._pipelines[name] = pipeline
        return self._pipelines[name]

    def changes(self, step: int) -> list[str]:
        """How the step's recipe, with its data and tokenizer, differs today: name: then -> now."""
        self.pipeline(step)
        return self._changes[self.logged(step).recipe]

    def _moved(self, recipe: Recipe) -> Recipe:
        known = [d.name for d in recipe.datasets]
        for name in self._data:
            if name not in known:
                raise AuditError(f"--data {name}: the recipe has no such dataset, but {known}")
        datasets = tuple(
            dataclasses.replace(d, path=self._data.get(d.name, d.path)) for d in recipe.datasets
        )
        tokenizer = dataclasses.replace(
            recipe.tokenizer, path=self._tokenizer or recipe.tokenizer.path
        )
        return dataclasses.replace(recipe, datasets=datasets, tokenizer=tokenizer)

    def step(self, step: int) -> RebuiltStep:
        """The global batch of a step, made again; whether it is the logged one it ``matches``."""
        logged, pipeline = self.logged(step), self.pipeline(step)
        if logged.batch is None or logged.batch < 1:
            raise AuditError(
                f"{self.run.name}: how many sequences step {step} had is not known, since the step "
                "before it is not logged"
            )
        first = logged.sequences - logged.batch
        lanes, numbers = step_slice(first, logged.batch, pipeline.lanes, 0, 1)
        places = zip(lanes.tolist(), numbers.tolist(), strict=True)
        try:
            sequences = [self._sequence(pipeline, logged.recipe, *place) for place in places]
        except (SourceError, StateError, ValueError, OSError) as error:
            raise AuditError(
                f"{self.run.name}: step {step} cannot be made again: {error}{self._because(step)}"
            ) from error
        return RebuiltStep(logged, sequences)

    def checked_step(self, step: int) -> RebuiltStep:
        """As ``step``; an AuditError if it is not, byte for byte, the logged one."""
        rebuilt = self.step(step)
        if not rebuilt.matches:
            raise AuditError(
                f"{self.run.name}: step {step}, made again, has SHA-256 {rebuilt.sha256[:16]}, the "
                f"log says {rebuilt.logged.sha256[:16]}, so what it held cannot be shown"
                f"{self._because(step)}"
            )
        return rebuilt

    def _because(self, step: int) -> str:
        changes = self.changes(step)
        if changes:
            return f"; changed since the run: {'; '.join(changes)}"
        return (
            "; the recipe and the checked sample of the data are as they were, so a shard was "
            "edited outside the sample, or the code changed, or the run was given other data"
        )

    def _sequence(self, pipeline: Pipeline, recipe: str, lane: int, number: int) -> Sequence:
        segment = number // pipeline.segment_rows
        reader = self._readers.get((recipe, lane))
        if reader is None or not reader.is_near(segment):
            reader = LaneReader(pipeline, self._newest_cursor(recipe, lane, segment))
            self._readers[recipe, lane] = reader
        return reader.sequence(number)

    def _newest_cursor(self, recipe: str, lane: int, segment: int) -> Cursor:
        logged = self._cursors.get((recipe, lane), {})
        known = [s for s in logged if s <= segment]
        if not known:
            raise AuditError(
                f"{self.run.folder}: no cursor of lane {lane} at or before segment {segment}"
            )
        return Cursor.from_json(logged[max(known)], lane)

    def pieces(self, step: int, sequence: Sequence) -> list[Piece]:
        """What a sequence is made of, decoded."""
        pipeline = self.pipeline(step)
        found = []
        for column, *reference in sequence.pieces.tolist():
            at = Reference(*reference)
            ids = sequence.inputs[column : column + at.stop - at.start].tolist()
            dataset = pipeline.datasets[at.dataset].name
            found.append(Piece(column, dataset, at, pipeline.tokenizer.decode(ids)))
        return found

    def origin(self, step: int, sequence: Sequence, piece: Piece) -> Origin:
        """The record of a shard that a piece was made from."""
        pipeline, name = self.pipeline(step), self.logged(step).recipe
        key = name, sequence.lane, piece.reference.dataset
        if key not in self._locators:
            feeds = pipeline.lane(pipeline.start(sequence.lane)).feeds
            self._locators[key] = Locator(feeds[piece.reference.dataset].walk)
        try:
            return self._locators[key].origin(piece.reference)
        except (SourceError, OSError, LookupError) as error:
            raise AuditError(f"{self.run.name}: step {step}: {error}") from error

    def search(
        self, steps: range, text: str, on_step: Callable[[int], None] = lambda step: None
    ) -> Iterator[tuple[RebuiltStep, int, Piece]]:
        """The pieces of the steps' sequences whose decoded text contains ``text``.

        A text that a row or a document's end cuts in two is not found. Each step is checked
        against the log; ``on_step`` is told of it before.
        """
        for step in steps:
            on_step(step)
            rebuilt = self.checked_step(step)
            for index, sequence in enumerate(rebuilt.sequences):
                for piece in self.pieces(step, sequence):
                    if text in piece.text:
                        yield rebuilt, index, piece


class LaneReader:
    """One lane from a cursor on, a segment at a time, forwards."""

    def __init__(self, pipeline: Pipeline, cursor: Cursor):
        self._pipeline = pipeline
        self._lane: Lane = pipeline.lane(cursor)
        self._segment = -1
        self._made: tuple[Rows, np.ndarray] | None = None

    def is_near(self, segment: int) -> bool:
        """Whether the segment is at hand or the next; others are better started from a cursor."""
        return segment in (self._segment, self._lane.cursor.segment)

    def sequence(self, number: int) -> Sequence:
        """The lane's sequence ``number``; padding where the data has ended.

        Asked for in rising order, to within a segment.
        """
        segment, place = divmod(number, self._pipeline.segment_rows)
        rows, order = self._rows(segment)
        lane = self._lane.cursor.lane
        if place < len(order):
            row = int(order[place])
        else:
            rows, row = padding_row(self._pipeline.recipe.seq_len, self._pipeline.pad_id), 0
        lo, hi = np.searchsorted(rows.pieces[:, 0], [row, row + 1])
        inputs, labels, positions = rows.sequences[:, row]
        return Sequence(lane, number, inputs, labels, positions, rows.pieces[lo:hi, 1:])

    def _rows(self, segment: int) -> tuple[Rows, np.ndarray]:
        """A segment's rows, and which of them goes out first, second and so on."""
        while self._made is None or self._segment < segment:
            self._segment = self._lane.cursor.segment
            rows = self._lane.produce(self._pipeline.segment_rows)
            first = self._segment * self._pipeline.segment_rows
            order = self._pipeline.emission_order(self._lane.cursor.lane, first, len(rows))
            self._made = rows, order
        assert self._segment == segment, "a lane is read forwards only"
        return self._made
