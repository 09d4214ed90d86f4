"""Files wherever fsspec finds them: listing shards with their sizes, and reading byte ranges."""

from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.core import url_to_fs

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Endings of compressed files, which are found only to be refused."""


class SourceError(ValueError):
    """Data that cannot be found or read: says what, where and what to do."""


@dataclass(frozen=True)
class Field:
    """What is wanted of a record: the text under a key or in a column, or its token ids."""

    name: str
    tokens: bool = False
    """Whether it is a list of token ids and no text."""


@dataclass(frozen=True)
class Shard:
    """One file of a dataset."""

    path: str
    """Path inside its file system."""
    name: str
    """Path below the dataset's folder, ``/``-separated: the same wherever the dataset is moved."""
    size: int
    """Bytes."""


def find_shards(
    path: str, suffixes: tuple[str, ...]
) -> tuple[fsspec.AbstractFileSystem, list[Shard]]:
    """The file system of ``path``, and its shards in the order of their names.

    ``path`` is a file, a glob, or a folder, in which files with one of ``suffixes`` are searched at
    any depth; names that begin with ``.`` or ``_`` are passed over.

    Raises:
        SourceError: nothing there, a folder where the glob means files, an empty shard.
    """
    try:
        fs, root = url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise SourceError(f"path {path!r}: {error}") from error
    if fsspec.core.has_magic(root):
        found = fs.glob(root, detail=True)
        folders = sorted(p for p, info in found.items() if info["type"] == "directory")
        if folders:
            raise SourceError(
                f"path {path!r}: the glob matches the folder {folders[0]!r}; it must match files "
                f"(add /**/*{suffixes[0]} for the files below folders)"
            )
        if not found:
            raise SourceError(f"path {path!r}: no file matches this glob")
        base = root[: root.index(next(c for c in root if c in "*?["))].rpartition("/")[0]
        found = {p: info for p, info in found.items() if not _hidden(p[len(base) :])}
        if not found:
            raise SourceError(f"path {path!r}: only hidden files (. or _) match this glob")
    elif fs.isdir(root):
        base = root.rstrip("/")
        wanted = suffixes + tuple(s + c for s in suffixes for c in COMPRESSED)
        found = {
            p: info
            for p, info in fs.find(root, detail=True).items()
            if p.endswith(wanted) and not _hidden(p[len(base) :])
        }
        if not found:
            raise SourceError(
                f"path {path!r}: no shard in this folder; files ending in "
                f"{' or '.join(suffixes)} are looked for"
            )
    elif fs.exists(root):
        found, base = {root: fs.info(root)}, root.rpartition("/")[0]
    else:
        raise SourceError(f"path {path!r}: no such file or folder")
    shards = [
        Shard(path=p, name=p[len(base) :].lstrip("/"), size=int(info["size"]))
        for p, info in found.items()
    ]
    empty = sorted(s.path for s in shards if s.size == 0)
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise SourceError(f"path {path!r}: the shard {empty[0]!r}{more} has 0 bytes; remove it")
    return fs, sorted(shards, key=lambda s: s.name.encode("utf-8", "surrogateescape"))


def _hidden(relative: str) -> bool:
    return any(part.startswith((".", "_")) for part in relative.split("/"))


def read_range(fs: Any, shard: Shard, start: int, end: int) -> bytes:
    """Bytes ``start`` to ``end`` of a shard, fewer where the file ends."""
    start, end = max(0, start), min(end, shard.size)
    if start >= end:
        return b""
    data = fs.cat_file(shard.path, start=start, end=end)
    if len(data) != end - start:
        raise SourceError(
            f"{shard.path}: {len(data)} bytes came back for bytes {start} to {end}: the file is "
            f"shorter than the {shard.size} bytes it had when the run began"
        )
    return data
