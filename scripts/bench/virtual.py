"""A file system that makes its files up as they are read: corpora far larger than any disk here.

`bench://repeat/SIZE/corpus.jsonl` repeats 8 MB of documents; `bench://words/SIZE/corpus.jsonl`
holds words of random letters, new ones everywhere. SIZE is in bytes. Reading costs what it costs to
copy the bytes (and to draw the letters), so a disk's own time is left out.
"""

import functools
import json
from typing import Any

import fsspec
import numpy as np

from bench.corpora import make_documents

BLOCK = 1 << 16
LINE = 1 << 12
_HEAD, _TAIL = b'{"text":"', b'"}\n'


class VirtualFileSystem(fsspec.AbstractFileSystem):
    """Serves byte ranges of made-up JSONL files."""

    protocol = "bench"
    cachable = False

    def info(self, path: str, **settings: Any) -> dict[str, Any]:
        """Every path is a file, of the size that it names."""
        kind, size = path.removeprefix("bench://").split("/")[:2]
        unit = len(repeated_block()) if kind == "repeat" else BLOCK
        return {"name": path, "type": "file", "size": max(1, int(size) // unit) * unit}

    def ls(self, path: str, detail: bool = True, **settings: Any) -> list[Any]:
        """The file itself."""
        return [self.info(path)] if detail else [path]

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **settings: Any,
    ) -> bytes:
        """Bytes ``start`` to ``end`` of a file."""
        start, end = start or 0, self.info(path)["size"] if end is None else end
        if path.removeprefix("bench://").startswith("repeat/"):
            block, size = repeated_block(), len(repeated_block())
            parts = [block] * (-(-end // size) - start // size)
        else:
            size = BLOCK
            parts = [block_of_words(i) for i in range(start // size, -(-end // size))]
        first = start // size * size
        return b"".join(parts)[start - first : end - first]


@functools.cache
def repeated_block() -> bytes:
    """8 MB of whole lines."""
    return "".join(json.dumps({"text": text}) + "\n" for text in make_documents(8)).encode()


@functools.cache
def _letters() -> np.ndarray:
    # One byte in nine is a space, the others are letters: words of eight letters on average.
    table = np.arange(256, dtype=np.int64) % 26 + 97
    table[::9] = 32
    return table.astype(np.uint8)


@functools.lru_cache(maxsize=4)
def block_of_words(number: int) -> bytes:
    """16 lines of 4 KiB, the same at every call, with other words in every block."""
    drawn = np.frombuffer(np.random.default_rng(number).bytes(BLOCK), dtype=np.uint8)
    lines = _letters()[drawn].reshape(-1, LINE)
    lines[:, : len(_HEAD)] = np.frombuffer(_HEAD, dtype=np.uint8)
    lines[:, -len(_TAIL) :] = np.frombuffer(_TAIL, dtype=np.uint8)
    return lines.tobytes()


def register() -> None:
    """Make ``bench://`` known to fsspec in this process, and make its block."""
    fsspec.register_implementation("bench", VirtualFileSystem, clobber=True)
    repeated_block()
