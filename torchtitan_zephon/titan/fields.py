"""Setting the fields of TorchTitan's nested config dataclasses from the tables of a TOML file."""

import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan_zephon.settings import check_value, nearest, read_table


def changed_fields(
    config: Any, table: dict[str, Any], where: str, faults: list[str]
) -> dict[str, Any]:
    """New values for the fields of the dataclass `config` that `table` names, checked by type."""
    fields = {f.name for f in dataclasses.fields(config) if f.name != "model_spec"}
    hints = typing.get_type_hints(type(config), include_extras=True)
    changes: dict[str, Any] = {}
    # Fields first: arguments of optimizers are set in the param_groups that the table gives.
    for key, value in sorted(table.items(), key=lambda entry: entry[0] not in fields):
        at = f"{where}.{key}" if where else key
        before = len(faults)
        if key in fields:
            new = new_value(getattr(config, key), value, hints[key], at, faults)
        elif where == "optimizer" and hasattr(config, "param_groups"):
            key, new = "param_groups", optimizer_argument(config, key, value, changes, faults)
        else:
            shown = "" if isinstance(value, dict | list) else f" = {value!r}"
            known = fields if where else fields | {"model", "zephon"}
            faults.append(f"{at}{shown}: no such setting; {nearest(key, known)}")
            continue
        if len(faults) == before:
            changes[key] = new
    return changes


def new_value(old: Any, value: Any, hint: Any, at: str, faults: list[str]) -> Any:
    """What the TOML value `value` of the setting `at` makes of the field that holds `old`."""
    if variants := _variants(hint):
        if isinstance(value, dict) and "mode" in value:
            value = dict(value)
            mode = value.pop("mode")
            if mode not in variants:
                faults.append(f"{at}.mode = {mode!r}: {nearest(str(mode), variants)}")
                return None
            if not isinstance(old, variants[mode]):
                old = variants[mode]() if variants[mode] is not type(None) else None
        if old is None and value:
            faults.append(f"{at}: has no settings in this mode; mode is one of {list(variants)}")
            return None
        hint = type(old)
    if old is None and hint is type(None):
        return None
    if dataclasses.is_dataclass(old):
        if not isinstance(value, dict):
            faults.append(f"{at} = {value!r}: expected a table, [{at}]")
            return None
        changes = changed_fields(old, value, at, faults)
        return _attempt(partial(dataclasses.replace, old, **changes), at, faults)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and dataclasses.is_dataclass(args[0]) and isinstance(value, list):
        entries = {f"{at}[{i}]": entry for i, entry in enumerate(value)}
        return [
            _attempt(partial(read_table, args[0], entry, name, faults), name, faults)
            for name, entry in entries.items()
        ]
    try:
        return check_value(value, hint, at, faults)
    except TypeError:  # msgspec knows no such type: a callable, say
        faults.append(f"{at}: cannot be set from a TOML file")
        return None


def optimizer_argument(
    config: Any, key: str, value: Any, changes: dict[str, Any], faults: list[str]
) -> Any:
    """Parameter groups with `key`, `lr` say, set in each whose optimizer is given it.

    TorchTitan keeps these arguments in a dict; the old value's type is the one to check against.
    """
    groups = changes.get("param_groups", config.param_groups)
    known = {k for group in groups for k in group.optimizer_kwargs}
    if key not in known:
        names = known | {f.name for f in dataclasses.fields(config)}
        faults.append(f"optimizer.{key} = {value!r}: no such setting; {nearest(key, names)}")
    new = []
    for group in groups:
        arguments = dict(group.optimizer_kwargs)
        if key in arguments:
            at = f"optimizer.{key}"
            arguments[key] = check_value(value, type(arguments[key]), at, faults)
        new.append(dataclasses.replace(group, optimizer_kwargs=arguments))
    return new


def _variants(hint: Any) -> dict[str, type]:
    """The classes among which a field chooses, by the names TorchTitan gives them on its CLI."""
    named: dict[str, type] = {}
    for option in typing.get_args(hint):
        for note in getattr(option, "__metadata__", ()):
            if getattr(note, "name", None):
                named[note.name] = option.__origin__
    return named


def _attempt(build: Callable[[], Any], at: str, faults: list[str]) -> Any:
    """`build()`, or None and a fault with what its `__post_init__` objects to."""
    try:
        return build()
    except (ValueError, AssertionError) as error:
        faults.append(f"[{at}]: {error}")
        return None
