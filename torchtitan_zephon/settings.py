"""Reading a settings table into a dataclass: every fault is collected, none stops the reading."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the nearest right spelling of ``name``, else with all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def check_value(value: Any, hint: Any, where: str, faults: list[str]) -> Any:
    """``value`` as the type ``hint`` (an int may stand for a float), or None and a fault."""
    if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
        choices = map(str, typing.get_args(hint))
        faults.append(f"{where} = {value!r}: {nearest(str(value), choices)}")
        return None
    try:
        return msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as error:
        faults.append(f"{where} = {value!r}: {str(error).replace('`', '')}")
        return None


def read_table(cls: type[T], table: Any, where: str, faults: list[str]) -> T | None:
    """``cls`` filled from ``table``, with a fault for each thing that is wrong in it.

    ``where`` is the full name of the table, such as ``zephon.packing``. Fields whose type is a
    dataclass are read from sub-tables, tuples of dataclasses from arrays of tables. A class may
    define ``faults() -> Iterable[str]`` with what types cannot say; each fault begins with a field.
    A faulty field gets its default, so that the others can still be checked; where it has none, the
    result is None. So what is returned is for use only if there were no faults.
    """
    if not isinstance(table, dict):
        faults.append(f"{where} = {table!r}: expected a table, [{where}]")
        return None
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
    hints = typing.get_type_hints(cls)
    for name in table:
        if name not in fields:
            faults.append(f"{where}.{name}: no such setting; {nearest(name, fields)}")
    values: dict[str, Any] = {}
    whole = True
    for name, field in fields.items():
        at = f"{where}.{name}"
        before = len(faults)
        if name in table:
            value = _read_field(table[name], hints[name], at, faults)
            if value is not None or len(faults) == before:
                values[name] = value
                continue
        elif _is_required(field):
            faults.append(f"{at}: missing")
        whole = whole and not _is_required(field)
    if not whole:
        return None
    result = cls(**values)
    faults.extend(f"{where}.{fault}" for fault in getattr(result, "faults", tuple)())
    return result


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _read_field(value: Any, hint: Any, where: str, faults: list[str]) -> Any:
    parts = [part for part in typing.get_args(hint) if dataclasses.is_dataclass(part)]
    if parts and type(None) in typing.get_args(hint):
        if value is None:
            return None
        hint = parts[0]  # a table that may be left out
    if dataclasses.is_dataclass(hint):
        return read_table(typing.cast(type, hint), value, where, faults)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and args and dataclasses.is_dataclass(args[0]):
        if not isinstance(value, list):
            faults.append(f"{where} = {value!r}: expected an array of tables, [[{where}]]")
            return None
        entries = [
            read_table(typing.cast(type, args[0]), item, f"{where}[{_label(item, i)}]", faults)
            for i, item in enumerate(value)
        ]
        return tuple(entry for entry in entries if entry is not None)
    return check_value(value, hint, where, faults)


def _label(item: Any, index: int) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) else str(index)
