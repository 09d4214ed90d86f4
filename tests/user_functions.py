"""Functions and classes that tests name by import path."""

import itertools
from collections.abc import Sequence
from typing import Any

_counter = itertools.count()


def shout(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "text": record["text"].upper()}


def is_short(record: dict[str, Any]) -> bool:
    return len(record["text"]) < 40


def sentences(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"text": part} for part in record["text"].split(".") if part]


def number_of_calls(record: dict[str, Any]) -> dict[str, Any]:
    """Not deterministic: what it returns depends on what was called before."""
    return {"text": f"{record['text']} {next(_counter)}"}


def fails_on_seven(record: dict[str, Any]) -> dict[str, Any]:
    if "7" in record["text"]:
        raise RuntimeError("seven")
    return record


def forgets_to_return(record: dict[str, Any]) -> None:
    record["text"] = "x"


class Alternate:
    """Draws from the datasets in turns, by the tokens they have given so far."""

    def choose(self, tokens: Sequence[int], available: Sequence[bool]) -> int:
        return min((t, i) for i, t in enumerate(tokens) if available[i])[1]


class LastFirst:
    """Draws from the last dataset that has a document left."""

    def choose(self, tokens: Sequence[int], available: Sequence[bool]) -> int:
        return len(available) - 1 - list(reversed(available)).index(True)


class Mistaken:
    """Chooses what is not there."""

    def choose(self, tokens: Sequence[int], available: Sequence[bool]) -> int:
        return len(available)


def has_even_last_digit(record: dict[str, Any]) -> bool:
    """For ids of the byte tokenizer with EOS behind, of which those of even digits are even."""
    return record["input_ids"][-2] % 2 == 0


def ids_to_text(record: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": bytes(i - 2 for i in record["input_ids"][1:-1]).decode()}
