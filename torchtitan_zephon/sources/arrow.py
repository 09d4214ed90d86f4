"""Arrow IPC, files and streams, as ``datasets.Dataset.save_to_disk`` writes them: not copied."""

import functools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from torchtitan_zephon.sources.columns import BLOCK_BYTES, check_column, deal, documents, find
from torchtitan_zephon.sources.storage import Field, Shard, SourceError

SUFFIXES = (".arrow", ".ipc", ".feather")
_CONVERT = "convert it to Parquet"


def chunk_bytes(total: int, lanes: int) -> int:
    """Bytes of a chunk: several chunks a lane of a small dataset, 1 MiB of a large one."""
    return max(1 << 14, min(total // (8 * lanes), 1 << 20))


def read_blocks(
    fs: Any, shard: Shard, chunk: int, chunks: int, size: int, field: Field | None
) -> Iterator[list[Any]]:
    """Column ``field``, or whole rows, of chunk ``chunk`` of ``chunks``, about 256 KiB a block.

    Texts are strings, token ids int32 arrays, which lie in the mapped file where they are int32
    there. What is dealt out is record batches, or equal parts of them.
    """
    del size
    batches = _batches(fs, shard)
    if field is not None and batches:
        check_column(batches[0].schema, shard, field)
    for number, first_row, begin, end in deal([len(b) for b in batches], chunk, chunks):
        batch = batches[number]
        column = batch if field is None else batch.column(field.name)
        step = max(1, BLOCK_BYTES // max(1, column.nbytes // max(1, len(batch))))
        for at in range(begin, end, step):
            some = batch.slice(at, min(step, end - at))
            try:
                ready = [documents(some, shard, first_row + at, field)]
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise SourceError(
                    f"{shard.path}, rows from {first_row + at} on: cannot be read: {error}"
                ) from error
            yield ready.pop()


def find_row(
    fs: Any, shard: Shard, chunk: int, chunks: int, place: int, field: Field | None
) -> tuple[int, Any]:
    """Number, counted in the shard, and value of the ``place``-th row of a chunk."""
    batches = _batches(fs, shard)
    number, at, row = find([len(b) for b in batches], chunk, chunks, place, shard)
    record = batches[number].slice(at, 1).to_pylist()[0]
    return row, record[field.name] if field else record


def _batches(fs: Any, shard: Shard) -> list[pa.RecordBatch]:
    if not isinstance(fs, LocalFileSystem):
        raise SourceError(
            f"{shard.path}: Arrow files are mapped, so they must lie on a local disk; copy it to "
            f"one, or {_CONVERT}"
        )
    return _mapped(shard)


@functools.lru_cache(maxsize=64)
def _mapped(shard: Shard) -> list[pa.RecordBatch]:
    """All record batches of a shard, views of the mapped file.

    Finding them takes some microseconds each; the shards looked at last stay open.
    """
    try:
        source = pa.memory_map(shard.path)
        whole = source.read_buffer(source.size())
        if whole[:6].to_pybytes() == b"ARROW1":
            file = pa.ipc.open_file(whole)
            batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        else:
            batches = list(pa.ipc.open_stream(whole))
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{shard.path}: not a readable Arrow file: {error}") from error
    for batch in batches:
        for column in batch.columns:
            for buffer in column.buffers():
                inside = (
                    buffer is None
                    or buffer.size == 0
                    or (whole.address <= buffer.address < whole.address + whole.size)
                )
                if not inside:
                    raise SourceError(
                        f"{shard.path}: a compressed Arrow file, which would have to be held in "
                        f"memory whole; {_CONVERT}"
                    )
    return batches
