"""``map``, ``filter`` and ``flat_map``: the user's own functions on records, in the worker half.

A function sees one record, a dict as it stands in the file, and nothing else; so it may run
anywhere, any number of times, and the stream stays a function of the recipe. Its source is part of
the fingerprint.
"""

import functools
import hashlib
import importlib
import inspect
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

Record = dict[str, Any]


class FunctionError(ValueError):
    """A user's function that cannot be found, raised, or returned what it may not."""


@dataclass(frozen=True)
class Function:
    """One step of a pipeline that is the user's."""

    kind: Literal["map", "filter", "flat_map"]
    """``map``: record -> record. ``filter``: record -> whether it stays. ``flat_map``: record ->
    records, any number of them."""
    call: Callable[[Record], Any]
    name: str
    """``module:function``, or for a function that has no import path a name for messages."""
    datasets: tuple[str, ...] = ()
    """Datasets that it is for; none named means all."""

    def identity(self) -> dict[str, Any]:
        """For the fingerprint: what it is and does, as far as its source tells."""
        return {
            "kind": self.kind,
            "function": self.name,
            "source": source_digest(self.call),
            "datasets": list(self.datasets),
        }


def resolve(kind: Literal["map", "filter", "flat_map"], name: str) -> Function:
    """The function at an import path, ``module:function``.

    Raises:
        FunctionError: there is none, or it cannot be called.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise FunctionError(f"function = {name!r}: expected 'module:function'")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise FunctionError(f"function = {name!r}: {error}") from error
    if not callable(found):
        raise FunctionError(f"function = {name!r}: is a {type(found).__name__}, not a function")
    return Function(kind, found, name)


def function_of(
    kind: Literal["map", "filter", "flat_map"], call: Callable[[Record], Any]
) -> Function:
    """A step from a function itself; ``name`` is its import path where it has one."""
    target: Any = call.func if isinstance(call, functools.partial) else call
    known = target if hasattr(target, "__qualname__") else type(target)
    name = f"{known.__module__}:{known.__qualname__}"
    return Function(kind, call, name if known is call else f"{name} <{type(call).__name__}>")


def is_importable(function: Function) -> bool:
    """Whether a function's name is the import path of that very function."""
    try:
        return resolve(function.kind, function.name).call is function.call
    except FunctionError:
        return False


def source_digest(call: Callable[..., Any]) -> str:
    """SHA-256 (hex) of a function's source text; of its byte code where there is no source."""
    digest = hashlib.sha256()
    target: Any = call
    while isinstance(target, functools.partial):
        digest.update(repr((target.args, sorted(target.keywords.items()))).encode())
        target = target.func
    if not hasattr(target, "__code__"):
        target = getattr(target, "__func__", target if inspect.isclass(target) else type(target))
    try:
        digest.update(inspect.getsource(target).encode())
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        names = getattr(target, "__qualname__", ""), getattr(code, "co_names", ())
        digest.update(repr(names).encode() + getattr(code, "co_code", b""))
        constants = getattr(code, "co_consts", ())
        digest.update(repr([c for c in constants if not inspect.iscode(c)]).encode())
    return digest.hexdigest()


_doing: dict[int, tuple[str, float]] = {}


def activities() -> list[str]:
    """What user functions are running in this process, on which document, and for how long."""
    now = time.monotonic()
    return [f"{what}, for {now - since:.0f} s" for what, since in list(_doing.values())]


def apply_functions(
    functions: Sequence[Function], records: list[Record], place: str
) -> tuple[list[Record], int]:
    """The records after all ``functions``, in order, and how many a filter left out.

    Raises:
        FunctionError: naming the function, the document and what happened.
    """
    left_out = 0
    numbers = list(range(len(records)))
    me = threading.get_ident()
    try:
        for function in functions:
            kept: list[Record] = []
            kept_numbers: list[int] = []
            for number, record in zip(numbers, records, strict=True):
                where = f"{function.kind} {function.name} on record {number} of {place}"
                _doing[me] = (where, time.monotonic())
                results = _call(function, record, where)
                left_out += function.kind == "filter" and not results
                kept += results
                kept_numbers += [number] * len(results)
            records, numbers = kept, kept_numbers
    finally:
        _doing.pop(me, None)
    return records, left_out


def _call(function: Function, record: Record, where: str) -> list[Record]:
    try:
        result = function.call(record)
        if function.kind == "filter":
            return [record] if result else []
        results = [result] if function.kind == "map" else list(result)
    except Exception as error:
        raise FunctionError(f"{where}: {error!r}; the record is {_shown(record)}") from error
    for one in results:
        if not isinstance(one, dict):
            hint = "; to leave records out use filter" if one is None else ""
            raise FunctionError(f"{where}: returned a {type(one).__name__}, not a record{hint}")
    return results


def _shown(record: Record) -> str:
    text = repr(record)
    return text if len(text) <= 200 else text[:197] + "..."


class ProcessRunner:
    """Runs ``apply_functions`` over several processes, each on an equal part of a block."""

    def __init__(self, pool: ProcessPoolExecutor, workers: int):
        self._pool, self._workers = pool, workers

    def __call__(
        self, functions: Sequence[Function], records: list[Record], place: str
    ) -> tuple[list[Record], int]:
        names = [(f.kind, f.name) for f in functions]
        size = max(1, -(-len(records) // self._workers))
        parts = [records[i : i + size] for i in range(0, len(records), size)]
        where = f"functions in other processes, on {place}"
        _doing[threading.get_ident()] = (where, time.monotonic())
        try:
            done = list(
                self._pool.map(
                    _apply_by_name,
                    [names] * len(parts),
                    parts,
                    [f"{place}, from record {i * size} on" for i in range(len(parts))],
                )
            )
        finally:
            _doing.pop(threading.get_ident(), None)
        return [r for kept, _ in done for r in kept], sum(n for _, n in done)


def end_with_parent() -> None:
    """In a worker process: end when the training process is gone, killed without a word perhaps."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="zephon-parent", daemon=True).start()


_resolved = functools.cache(resolve)


def _apply_by_name(
    names: list[tuple[Literal["map", "filter", "flat_map"], str]],
    records: list[Record],
    place: str,
) -> tuple[list[Record], int]:
    return apply_functions([_resolved(kind, name) for kind, name in names], records, place)


def faults_in_other_processes(functions: Sequence[Function]) -> list[str]:
    """Why functions cannot run in other processes: one line for each that cannot be imported."""
    return [
        f"{function.kind} {function.name}: other processes find functions by import path, and this "
        "one has none; define it at the top of a module, or use runner = 'threads'"
        for function in functions
        if not is_importable(function)
    ]
