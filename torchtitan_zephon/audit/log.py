"""The audit log: what every optimizer step was trained on, as SHA-256.

``global_batches.jsonl`` has one line a step, ``cursors.jsonl`` the lanes' cursors as their segments
start, from which any past batch can be made again. Both are only ever appended to.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

BATCHES = "global_batches.jsonl"
CURSORS = "cursors.jsonl"


PRIME = 2**61 - 1
"""Modulus of the ``sums`` in the log; a prime, so that one can divide."""


class AuditError(RuntimeError):
    """A step that was run again got other data than the log says it had."""


@dataclass(frozen=True)
class Share:
    """What one rank tells of one step."""

    digests: list[bytes]
    """SHA-256 of the rank's sequences, in step order."""
    tokens: list[int]
    """Trained tokens of each dataset."""
    cursors: list[tuple[int, int, str]]
    """Lane, segment and cursor (JSON) of segments that this step is the first to take from."""

    def to_bytes(self) -> bytes:
        """For the way to the rank that writes the log."""
        head = json.dumps([self.tokens, self.cursors]).encode()
        return head + b"\n" + b"".join(self.digests)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Share":
        """The inverse of ``to_bytes``."""
        head, _, rest = data.partition(b"\n")
        tokens, cursors = json.loads(head)
        return cls(
            [rest[i : i + 32] for i in range(0, len(rest), 32)],
            tokens,
            [(lane, segment, text) for lane, segment, text in cursors],
        )


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a last line torn by a kill is passed over.

    Raises:
        AuditError: another line cannot be read.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            # Writers end what they find torn with a newline before they append, so a torn line may
            # also stand in the middle; a complete one always ends with a brace.
            if line.rstrip().endswith(b"}"):
                raise AuditError(f"{path}, line {number}: not JSON ({error})") from error


def sequence_value(digest: bytes) -> int:
    """The number that stands for a sequence in the ``sums``: its SHA-256's first 8 bytes."""
    return int.from_bytes(digest[:8], "big") % PRIME


def step_sums(digests: list[bytes]) -> tuple[int, int]:
    """The sum of a step's sequence values, and the sum with each weighted by its place, from 1.

    They tell where two runs differ without a digest of each sequence in the log, as the syndromes
    of a Reed-Solomon code would: equal first sums mean the same sequences in another order, and
    where one sequence alone differs the quotient of the two differences is its place.
    """
    total = weighted = 0
    for place, digest in enumerate(digests, start=1):
        value = sequence_value(digest)
        total, weighted = total + value, weighted + place * value
    return total % PRIME, weighted % PRIME


class AuditLog:
    """Appends to the log in ``folder``, and checks steps that it has already.

    Args:
        folder: made if it is not there.
        fingerprint: of the recipe; lines of another one are not compared.
        names: of the datasets, in the recipe's order.
        recipe: written beside the log once, for whoever reads it later.
    """

    def __init__(self, folder: Path, fingerprint: str, names: list[str], recipe: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._names = names
        self._recipe = fingerprint[:12]
        self._chain: dict[int, str] = {}
        self._logged: dict[tuple[int, int], str] = {}
        for line in read_lines(folder / BATCHES):
            if line["recipe"] == self._recipe:
                self._logged[line["step"], line["sequences"]] = line["sha256"]
                self._chain[line["step"]] = line["chain"]
        self._known = {
            (c["lane"], c["segment"])
            for c in read_lines(folder / CURSORS)
            if c["recipe"] == self._recipe
        }
        self._start = hashlib.sha256(fingerprint.encode()).hexdigest()
        self._path = folder / BATCHES
        self._batches = _open(folder / BATCHES)
        self._cursors = _open(folder / CURSORS)
        described = folder / f"recipe-{self._recipe}.json"
        if not described.exists():
            described.write_text(json.dumps(recipe, indent=2, ensure_ascii=False) + "\n", "utf-8")

    def append(self, step: int, sequences: int, shares: list[Share]) -> None:
        """Log a step from the shares of all ranks in order.

        Raises:
            AuditError: the log has this step already, with another digest.
        """
        sequence_digests = [d for s in shares for d in s.digests]
        digest = hashlib.sha256(b"".join(sequence_digests)).hexdigest()
        before = self._chain.get(step - 1, self._start)
        chain = hashlib.sha256(bytes.fromhex(before) + bytes.fromhex(digest)).hexdigest()
        record = {
            "step": step,
            "sequences": sequences,
            "sha256": digest,
            "chain": chain,
            "sums": "{:016x}{:016x}".format(*step_sums(sequence_digests)),
            "dp_degree": len(shares),
            "tokens": {
                name: sum(s.tokens[i] for s in shares) for i, name in enumerate(self._names)
            },
            "recipe": self._recipe,
        }
        logged = self._logged.get((step, sequences))
        self._logged[step, sequences], self._chain[step] = digest, chain
        self._batches.write(_line(record))
        for lane, segment, text in sorted({c for s in shares for c in s.cursors}):
            if (lane, segment) not in self._known:
                self._known.add((lane, segment))
                cursor = {"lane": lane, "segment": segment, "recipe": self._recipe}
                self._cursors.write(_line({**cursor, "cursor": json.loads(text)}))
        if logged is not None and logged != digest:
            raise AuditError(
                f"step {step} was run again and got other data than before: SHA-256 {digest} now, "
                f"{logged} in {self._path}. The recipe is the same, so a file of the dataset or "
                "the code changed; do not trust this run until you know which"
            )

    def flush(self) -> None:
        """Let others see what is appended."""
        self._batches.flush()
        self._cursors.flush()

    def close(self) -> None:
        """Close the files."""
        self._batches.close()
        self._cursors.close()


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _open(path: Path) -> Any:
    handle = open(path, "ab+")  # noqa: SIM115 - held open for the whole run
    if handle.tell() > 0:
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) != b"\n":
            handle.write(b"\n")
    return handle
