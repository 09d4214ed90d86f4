"""A saved loader state in words: read from a distributed checkpoint without a process group."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_zephon.lane import Cursor, StateError
from torchtitan_zephon.recipe import FORMAT_VERSION, differences, digest_json
from torchtitan_zephon.state import next_number

_META = "dataloader.meta"
_LANE = "dataloader.lane."


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or holds nothing of this loader."""


@dataclass
class SavedState:
    """What a checkpoint holds of the data."""

    path: Path
    meta: dict[str, Any]
    """``steps``, ``sequences``, ``lanes``, ``segment_rows``, ``fingerprint`` and ``recipe``."""
    cursors: dict[int, Cursor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """What is missing or damaged, one line each."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        lanes = {
            str(lane): {k: v for k, v in json.loads(c.to_json()).items() if k != "check"}
            for lane, c in sorted(self.cursors.items())
        }
        return {"path": str(self.path), **self.meta, "lane": lanes, "faults": self.faults}

    def tokens(self) -> dict[str, int]:
        """Tokens that the lanes have drawn of each dataset up to their segments' starts."""
        drawn: dict[str, int] = {}
        for cursor in self.cursors.values():
            for name, at in cursor.positions:
                drawn[name] = drawn.get(name, 0) + at[3]
        return drawn


def find_checkpoint(path: str) -> Path:
    """``path`` if it is a checkpoint, else the newest one below it, as TorchTitan names them.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    if (folder / ".metadata").is_file():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    found = [
        (int(step.name.removeprefix("step-")), step)
        for parent in (folder, folder / "checkpoint")
        for step in parent.glob("step-*")
        if step.name.removeprefix("step-").isdigit() and (step / ".metadata").is_file()
    ]
    if not found:
        raise CheckpointError(
            f"{path}: no distributed checkpoint here (no .metadata, and no step-N that has one); a "
            "save that was cut short has none"
        )
    return max(found)[1]


def read_state(path: str) -> SavedState:
    """The loader's state in a checkpoint, with what is wrong with it.

    Raises:
        CheckpointError: no checkpoint, one of another loader, or one whose ``meta`` is unreadable.
    """
    folder = find_checkpoint(path)
    try:
        keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle; whatever is wrong with it
        raise CheckpointError(f"{folder}: its .metadata cannot be read ({error!r})") from error
    if _META not in keys:
        others = sorted(k for k in keys if k.startswith("dataloader"))
        what = f"its data loader's entries are {', '.join(others[:3])}" if others else "none at all"
        raise CheckpointError(f"{folder}: no entry {_META}, so no state of this loader ({what})")
    wanted = [_META, *sorted(k for k in keys if k.startswith(_LANE))]
    entries, faults = _read_entries(folder, wanted)
    if _META not in entries:
        raise CheckpointError(f"{folder}: {'; '.join(faults)}")
    try:
        meta = json.loads(entries[_META])
        state = SavedState(folder, meta, faults=faults)
        _check_meta(state)
        _read_cursors(state, entries)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: the entry {_META} is damaged ({error!r})") from error
    return state


def _read_entries(folder: Path, keys: list[str]) -> tuple[dict[str, str], list[str]]:
    try:
        return _load(folder, keys), []
    except (CheckpointException, Exception):  # names no entry: find out one by one
        pass
    entries, faults = {}, []
    for key in keys:
        try:
            entries |= _load(folder, [key])
        except CheckpointException as error:  # a BaseException, with those of the "ranks" in it
            reason = next(iter(error.failures.values()))[0]
            faults.append(f"{key}: cannot be read ({reason})")
        except Exception as error:
            faults.append(f"{key}: cannot be read ({error!r})")
    return entries, faults


def _load(folder: Path, keys: list[str]) -> dict[str, str]:
    state: dict[str, Any] = dict.fromkeys(keys, "")
    # Unflattened, and the very dict that is passed gets the entries.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return state


def _check_meta(state: SavedState) -> None:
    meta = state.meta
    if meta["format_version"] != FORMAT_VERSION:
        state.faults.append(
            f"format version {meta['format_version']}; this release reads {FORMAT_VERSION}"
        )
    if digest_json(meta["recipe"]) != meta["fingerprint"]:
        state.faults.append(f"{_META}: the fingerprint is not that of the recipe beside it")


def _read_cursors(state: SavedState, entries: dict[str, str]) -> None:
    meta = state.meta
    unread = {fault.partition(":")[0] for fault in state.faults}
    for lane in range(meta["lanes"]):
        key = f"{_LANE}{lane:05d}"
        if key not in entries:
            if key not in unread:
                state.faults.append(f"{key}: missing")
            continue
        try:
            cursor = Cursor.from_json(entries[key], lane)
        except StateError as error:
            reason = str(error).partition(" is damaged: ")[2].partition(";")[0]
            state.faults.append(f"{key}: damaged ({reason or error})")
            continue
        state.cursors[lane] = cursor
        due = next_number(meta["sequences"], lane, meta["lanes"]) // meta["segment_rows"]
        if cursor.segment != due:
            state.faults.append(
                f"{key}: of segment {cursor.segment}, where {due} is due after "
                f"{meta['sequences']} sequences"
            )


def state_differences(old: SavedState, new: SavedState) -> Iterator[str]:
    """What differs between two states, as ``name: old -> new``."""
    for name in ("format_version", "steps", "sequences", "lanes", "segment_rows"):
        yield from differences(old.meta.get(name), new.meta.get(name), name)
    yield from differences(old.meta.get("recipe"), new.meta.get("recipe"), "recipe")
    lanes = [{str(n): json.loads(c.to_json()) for n, c in s.cursors.items()} for s in (old, new)]
    for side in lanes:
        for entry in side.values():
            del entry["check"], entry["lane"]
    yield from differences(lanes[0], lanes[1], "lane")
    if old.faults != new.faults:
        yield f"faults: {len(old.faults)} -> {len(new.faults)}"
