"""Arrow IPC: rows once and in order whatever the record batches, and nothing copied."""

from collections.abc import Sequence
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_zephon.sources import arrow
from torchtitan_zephon.sources.storage import Field, Shard, SourceError

LOCAL = fsspec.filesystem("file")
TEXT = Field("text")


def write(
    path: Path, table: pa.Table, rows: int = 1000, *, stream: bool = False, **options
) -> Path:
    """Writes an IPC file, or stream, in record batches of ``rows`` rows."""
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    how = pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=how) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)
    return path


def texts(values: Sequence[str | None]) -> pa.Table:
    return pa.table({"text": pa.array(values, pa.string())})


def chunked(path: Path, chunks: int, field: Field | None = TEXT) -> list[list]:
    """The documents of each chunk."""
    shard = Shard(str(path), path.name, path.stat().st_size)
    return [
        [d for block in arrow.read_blocks(LOCAL, shard, c, chunks, 0, field) for d in block]
        for c in range(chunks)
    ]


def refusal(path: Path, field: Field = TEXT) -> str:
    with pytest.raises(SourceError) as caught:
        chunked(path, 1, field)
    return str(caught.value)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 60),
    batch=st.integers(1, 70),
    chunks=st.integers(1, 30),
    stream=st.booleans(),
)
def test_all_chunks_together_give_every_row_once_and_in_order(
    tmp_path_factory, rows, batch, chunks, stream
):
    values = [str(i) for i in range(rows)]
    folder = tmp_path_factory.mktemp("arrow")
    path = write(folder / "a.arrow", texts(values), batch, stream=stream)
    assert [text for chunk in chunked(path, chunks) for text in chunk] == values


def test_a_folder_of_hugging_face_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "é😀", ""]}).save_to_disk(tmp_path / "saved")
    assert chunked(tmp_path / "saved" / "data-00000-of-00001.arrow", 2) == [["a"], ["é😀", ""]]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_views_of_the_mapped_file(tmp_path, stream):
    table = pa.table({"ids": pa.array([[1, 2, 3], [], [70_000]], pa.list_(pa.int32()))})
    path = write(tmp_path / "a.arrow", table, stream=stream)
    ((first, empty, last),) = chunked(path, 1, Field("ids", tokens=True))
    assert (first.tolist(), empty.tolist(), last.tolist()) == ([1, 2, 3], [], [70_000])
    assert first.dtype == last.dtype == np.int32
    assert not first.flags.owndata
    assert last.ctypes.data == first.ctypes.data + 12


def test_whole_records_are_dicts(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"text": ["a"], "n": [3]}))
    assert chunked(path, 1, None) == [[{"text": "a", "n": 3}]]


def test_a_row_is_found_by_its_place_in_a_chunk(tmp_path):
    path = write(tmp_path / "a.arrow", texts([str(i) for i in range(20)]), 3)
    shard = Shard(str(path), "a.arrow", 1)
    chunks = chunked(path, 4)
    for number, chunk in enumerate(chunks):
        for place, text in enumerate(chunk):
            found = arrow.find_row(LOCAL, shard, number, 4, place, TEXT)
            assert found == (int(text), text)


def test_nulls_missing_columns_and_other_types_are_named(tmp_path):
    path = write(tmp_path / "a.arrow", texts(["a", "b", "c", None]), 2)
    assert refusal(path) == f"{path}, row 3: column 'text' is null; every row must hold a string"
    assert refusal(path, Field("body")) == (
        f"{path}: no column 'body'; columns here: text (set text_field)"
    )
    assert refusal(path, Field("text", tokens=True)) == (
        f"{path}: column 'text' holds string, not lists of integers"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_compressed_file_is_refused_with_what_to_do(tmp_path, stream):
    path = write(tmp_path / "a.arrow", texts(["abc" * 1000]), stream=stream, compression="zstd")
    assert refusal(path) == (
        f"{path}: a compressed Arrow file, which would have to be held in memory whole; convert it "
        "to Parquet"
    )


def test_a_file_that_is_no_arrow_and_one_cut_off_are_named(tmp_path):
    path = tmp_path / "a.arrow"
    path.write_bytes(b"nonsense" * 10)
    assert refusal(path).startswith(f"{path}: not a readable Arrow file: ")
    whole = write(tmp_path / "b.arrow", texts(["a" * 500] * 50), 10).read_bytes()
    (tmp_path / "c.arrow").write_bytes(whole[: len(whole) // 2])
    assert refusal(tmp_path / "c.arrow").startswith(f"{tmp_path}/c.arrow: not a readable Arrow")


def test_a_file_behind_a_url_is_refused_with_what_to_do(tmp_path):
    shard = Shard("bucket/a.arrow", "a.arrow", 10)
    with pytest.raises(SourceError, match="must lie on a local disk; copy it to one, or convert"):
        list(arrow.read_blocks(fsspec.filesystem("memory"), shard, 0, 1, 0, TEXT))
