"""What a checkpoint holds of the data: a ``meta`` entry and one entry for each lane.

All entries are JSON strings. Each rank saves the lanes it makes and loads the lanes it will make;
that the ranks are others then is nothing the entries know of.
"""

import dataclasses
import json
import logging
from typing import Any

from torchtitan_zephon.lane import Cursor, StateError
from torchtitan_zephon.ops.shuffle import shuffled_rows
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.recipe import FORMAT_VERSION, differences

logger = logging.getLogger(__name__)

# Recipe fields that a place in the data depends on; a place means nothing under other values.
_PLACE_FIELDS = ("seed", "tokenizer", "chat", "shuffle.order", "operators")
_META_KEYS = ("steps", "sequences", "lanes", "segment_rows", "fingerprint", "recipe")


def next_number(consumed: int, lane: Any, lanes: int) -> Any:
    """The number of a lane's next sequence when ``consumed`` sequences of the run are behind.

    Of many lanes, given as an array, likewise an array.
    """
    return (consumed - lane + lanes - 1) // lanes  # from 0 on: lane is at most lanes - 1


def save_state(
    pipeline: Pipeline, steps: int, consumed: int, entries: dict[int, tuple[int, str]]
) -> dict[str, Any]:
    """The state after ``steps`` steps and ``consumed`` sequences, with these lanes' entries."""
    meta = {
        "format_version": FORMAT_VERSION,
        "steps": steps,
        "sequences": consumed,
        "lanes": pipeline.lanes,
        "segment_rows": pipeline.segment_rows,
        "fingerprint": pipeline.fingerprint,
        "recipe": pipeline.identity,
    }
    return {
        "meta": json.dumps(meta, ensure_ascii=False),
        "lane": {f"{lane:05d}": entry for lane, (_, entry) in entries.items()},
    }


def saved_lanes(state: dict[str, Any]) -> int | None:
    """The number of lanes that a state was saved with, None where it does not tell."""
    try:
        return json.loads(state["meta"])["lanes"]
    except (ValueError, KeyError, TypeError):
        return None  # damaged, which read_meta reports


def read_meta(state: dict[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """The state's ``meta``, if the run that ``pipeline`` belongs to can go on from it.

    Raises:
        StateError: it is missing, damaged or of another format, or the recipe is another one.
    """
    if "meta" not in state:
        raise StateError(
            "the checkpoint has no loader entry (dataloader.meta): it was not saved by this data "
            "loader, so there is no place in the data to go on from"
        )
    try:
        meta = json.loads(state["meta"])
        version = meta["format_version"]
        if version == FORMAT_VERSION:
            meta = {key: meta[key] for key in _META_KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"the checkpoint's entry dataloader.meta is damaged ({error!r}); it reads "
            f"{str(state['meta'])[:80]!r}"
        ) from error
    if version != FORMAT_VERSION:
        raise StateError(
            f"the checkpoint has format version {version}, this release reads {FORMAT_VERSION}; "
            "resume with the release that saved it"
        )
    if meta["fingerprint"] != pipeline.fingerprint:
        _check_change(meta, pipeline)
    elif meta["segment_rows"] != pipeline.segment_rows:
        raise StateError(
            f"the checkpoint has segments of {meta['segment_rows']} sequences, this release makes "
            f"them of {pipeline.segment_rows}; resume with the release that saved it"
        )
    return meta


def _check_change(meta: dict[str, Any], pipeline: Pipeline) -> None:
    changed = "\n  ".join(differences(meta["recipe"], pipeline.identity))
    accept = pipeline.recipe.resume.on_recipe_change == "accept"
    if meta["lanes"] != pipeline.lanes:
        advice = f"the number of lanes cannot change: set zephon.lanes = {meta['lanes']}"
    elif accept and pipeline.shuffled_rows != shuffled_rows(
        meta["recipe"]["shuffle"]["buffer_size"], pipeline.lanes
    ):
        advice = "zephon.shuffle.buffer_size cannot change in mid-run: put the old value back"
    elif accept:
        logger.warning("going on under another recipe, as asked for; saved -> now:\n  %s", changed)
        return
    else:
        advice = (
            "put the old values back, or set zephon.resume.on_recipe_change = 'accept' to go on "
            "with a stream that is neither recipe's"
        )
    raise StateError(
        f"the checkpoint was made with another recipe; saved -> now:\n  {changed}\n{advice}"
    )


def read_cursors(
    state: dict[str, Any], meta: dict[str, Any], pipeline: Pipeline, lanes: list[int]
) -> dict[int, Cursor]:
    """The cursors of ``lanes``, checked against ``meta``.

    Raises:
        StateError: an entry is missing, damaged, or from another checkpoint than ``meta``.
    """
    entries = state.get("lane", {})
    cursors = {}
    for lane in lanes:
        key = f"{lane:05d}"
        if key not in entries:
            raise StateError(
                f"the checkpoint has no entry for lane {lane} (dataloader.lane.{key}); resume from "
                "another checkpoint"
            )
        cursor = Cursor.from_json(entries[key], lane)
        due = next_number(meta["sequences"], lane, meta["lanes"]) // meta["segment_rows"]
        if cursor.segment != due:
            raise StateError(
                f"the checkpoint's entry for lane {lane} is of segment {cursor.segment}, but after "
                f"{meta['sequences']} sequences the lane is in segment {due}: its entries come "
                "from different checkpoints"
            )
        cursors[lane] = cursor
    if meta["fingerprint"] != pipeline.fingerprint:
        cursors = {n: _adapted(c, meta["recipe"], pipeline) for n, c in cursors.items()}
    return cursors


def _adapted(cursor: Cursor, old: dict[str, Any], pipeline: Pipeline) -> Cursor:
    """The cursor under a changed recipe: places that still mean something are kept.

    A dataset whose places mean nothing any more goes on with its next chunk. When the mixture
    changed, shares follow the new weights from here on, whatever they were before.
    """
    new = pipeline.identity
    same_places = all(_field(old, f) == _field(new, f) for f in _PLACE_FIELDS)
    same_data = {
        name: same_places and _data_only(old["datasets"].get(name)) == _data_only(d)
        for name, d in new["datasets"].items()
    }
    same_mixture = _mixture_only(old) == _mixture_only(new)
    known = dict(cursor.positions)
    left_out = dict(zip(known, cursor.left_out, strict=True))
    positions = []
    for dataset in pipeline.datasets:
        ordinal, block, row, tokens = known.get(dataset.name, (0, 0, 0, 0))
        if dataset.name in known and not same_data[dataset.name]:
            ordinal, block, row = ordinal + 1, 0, 0
        positions.append((dataset.name, (ordinal, block, row, tokens)))
    unfinished = cursor.unfinished
    same_rows = all(old[f] == new[f] for f in ("seq_len", "packing"))
    lost = 0
    if not (same_rows and same_mixture and all(same_data.values())):
        lost = sum(r.stop - r.start for row in unfinished for r in row)
        unfinished = ()
    if lost:
        logger.warning(
            "lane %d: %d tokens that were read but not trained on yet are dropped, because the "
            "changed recipe packs other rows",
            cursor.lane,
            lost,
        )
    return dataclasses.replace(
        cursor,
        positions=tuple(positions),
        unfinished=unfinished,
        left_out=tuple(left_out.get(d.name, (0, 0)) for d in pipeline.datasets),
        dropped=cursor.dropped + lost,
        phase=cursor.phase if same_mixture else 0,
        base=cursor.base if same_mixture else tuple(at[3] for _, at in positions),
    )


def _field(identity: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        identity = identity[part]
    return identity


_DATA = ("content", "catalogue", "text_field", "tokens_field")


def _data_only(dataset: dict[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (dataset or {}).items() if k in _DATA}


def _mixture_only(identity: dict[str, Any]) -> Any:
    datasets = {n: (d["place"], d["weight"]) for n, d in identity["datasets"].items()}
    return datasets, identity["phases"], identity["work_source"]
