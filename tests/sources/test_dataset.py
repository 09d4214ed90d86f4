"""A dataset: chunks over all shards, formats told apart, and a fingerprint of the data itself."""

import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.toys import write_jsonl, write_parquet
from torchtitan_zephon.recipe import DatasetConfig
from torchtitan_zephon.sources.dataset import Dataset
from torchtitan_zephon.sources.storage import SourceError


def dataset(path: object, lanes: int = 1, **settings) -> Dataset:
    return Dataset(DatasetConfig(name="web", path=str(path), **settings), lanes)


def all_texts(data: Dataset) -> list[str]:
    return [t for chunk in range(data.num_chunks) for block in data.blocks(chunk) for t in block]


def refusal(path: object, **settings) -> str:
    with pytest.raises(SourceError) as caught:
        dataset(path, **settings)
    return str(caught.value)


def numbered(start: int, stop: int) -> list[str]:
    return [f"document {i}" for i in range(start, stop)]


@pytest.mark.parametrize("lanes", [1, 3, 64])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_chunks_of_all_shards_in_a_row_are_the_dataset_in_file_order(tmp_path, write, lanes):
    end = write.__name__.removeprefix("write_")
    write(tmp_path / f"a.{end}", numbered(0, 3000))
    write(tmp_path / f"b/c.{end}", numbered(3000, 3001))
    write(tmp_path / f"d.{end}", numbered(3001, 5000))
    data = dataset(tmp_path, lanes)
    assert data.format == end
    assert [s.name for s in data.shards] == [f"a.{end}", f"b/c.{end}", f"d.{end}"]
    assert data.num_chunks >= 3
    assert all_texts(data) == numbered(0, 5000)


def test_a_chunk_lies_in_one_shard_and_shards_have_chunks_by_their_size(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 86] * 25)  # 100 bytes a line, 1024 bytes a chunk
    write_jsonl(tmp_path / "b.jsonl", ["y" * 86])
    write_jsonl(tmp_path / "c.jsonl", ["z" * 86] * 10)
    data = dataset(tmp_path)
    assert data.chunk_bytes == 1024
    assert data.num_chunks == 3 + 1 + 1
    counts = [[len(block) for block in data.blocks(chunk)] for chunk in range(5)]
    assert counts == [[11], [10], [4], [1], [10]]


def test_blocks_start_where_they_are_asked_to(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x" * 100_000 + str(i) for i in range(10)])
    data = dataset(tmp_path / "a.parquet")
    every = list(data.blocks(0))
    assert len(every) > 2
    assert list(data.blocks(0, 1)) == every[1:]
    assert list(data.blocks(0, len(every))) == []


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_a_dataset_may_lie_behind_a_url(tmp_path, end):
    write = {"jsonl": write_jsonl, "parquet": write_parquet}[end]
    fs = fsspec.filesystem("memory")
    fs.pipe(f"/dataset/a.{end}", write(tmp_path / "x", numbered(0, 500)).read_bytes())
    try:
        assert all_texts(dataset("memory://dataset", lanes=4)) == numbered(0, 500)
        assert all_texts(dataset(f"memory://dataset/a.{end}")) == numbered(0, 500)
    finally:
        fs.rm("/dataset", recursive=True)


def test_the_format_goes_by_the_ending_or_is_forced(tmp_path):
    write_jsonl(tmp_path / "a.txt", ["x"])
    assert refusal(tmp_path / "a.txt").endswith(
        "the ending of 'a.txt' names no known format; set format to one of jsonl, parquet, arrow"
    )
    assert all_texts(dataset(tmp_path / "a.txt", format="jsonl")) == ["x"]
    for end in ("jsonl", "ndjson", "json"):
        assert dataset(write_jsonl(tmp_path / f"b.{end}", ["x"])).format == "jsonl"
    for end in ("parquet", "pq"):
        assert dataset(write_parquet(tmp_path / f"b.{end}", ["x"])).format == "parquet"


def test_several_formats_in_one_folder_are_refused_unless_one_is_named(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["j"])
    write_parquet(tmp_path / "b.parquet", ["p"])
    assert refusal(tmp_path) == (
        f"path '{tmp_path}': files of several formats ('a.jsonl', 'b.parquet'); set format"
    )
    assert all_texts(dataset(tmp_path, format="jsonl")) == ["j"]
    assert all_texts(dataset(tmp_path, format="parquet")) == ["p"]


@pytest.mark.parametrize("end", ["gz", "zst", "xz", "bz2"])
def test_a_compressed_file_is_refused_with_what_to_do(tmp_path, end):
    path = write_jsonl(tmp_path / f"a.jsonl.{end}", ["x"])
    assert refusal(path) == (
        f"path '{path}': 'a.jsonl.{end}' is compressed; compressed shards cannot be cut into "
        "chunks: unpack them, or convert them to Parquet"
    )


def test_compressed_shards_in_a_folder_are_refused_and_not_passed_over(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    write_jsonl(tmp_path / "b.jsonl.gz", ["x"])
    assert "'b.jsonl.gz' is compressed" in refusal(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    assert "'b.jsonl.gz' is compressed" in refusal(tmp_path)


def test_first_pass_over_shards_without_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 5000)
    write_jsonl(tmp_path / "b.jsonl", ["x", "y", "z"])
    assert dataset(tmp_path).first(2) == ["x", "y"]


def test_a_dataset_of_blank_lines_has_no_first(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n \r\n\t\n")
    with pytest.raises(SourceError, match="dataset 'web': its 1 shards hold no document"):
        dataset(tmp_path).first(1)


def test_opening_a_dataset_reads_none_of_its_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"this is not JSON\n" * 100)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c.parquet").write_bytes(b"nor Parquet")
    assert dataset(tmp_path / "a.jsonl").num_chunks == 2
    assert dataset(tmp_path / "b").num_chunks == 1


def test_the_fingerprint_names_what_identifies_the_data(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"t": 1}\n')
    assert dataset(tmp_path, text_field="t").fingerprint() == {
        "format": "jsonl",
        "text_field": "t",
        "shards": 1,
        "bytes": 9,
        # printf 'a.jsonl\0009\n' | sha256sum; printf '{"t": 1}\n' | sha256sum
        "catalogue": "f6a0ad5b6c4ae5694464ca2dd18256fdfc7a23e536c4252b68b76188bf2d8e84",
        "content": "1f0815cc7721e69167e468ea09127f28bc7fd819ffc4304d71f2095b50d89dda",
    }


def test_the_fingerprint_is_the_same_wherever_the_folder_lies(tmp_path):
    write_jsonl(tmp_path / "old/a.jsonl", numbered(0, 10))
    write_jsonl(tmp_path / "old/b/c.jsonl", numbered(10, 20))
    before = dataset(tmp_path / "old").fingerprint()
    shutil.move(tmp_path / "old", tmp_path / "new")
    fs = fsspec.filesystem("memory")
    fs.put(str(tmp_path / "new"), "/moved", recursive=True)
    try:
        assert dataset(tmp_path / "new").fingerprint() == before
        assert dataset(f"{tmp_path}/new/**/*.jsonl").fingerprint() == before
        assert dataset("memory://moved").fingerprint() == before
    finally:
        fs.rm("/moved", recursive=True)


def edit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_the_fingerprint_changes_with_any_one_byte_of_a_small_dataset(tmp_path, at):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 150)
    write_jsonl(tmp_path / "b.jsonl", ["x" * 1000] * 150)
    before = dataset(tmp_path).fingerprint()
    edit(tmp_path / "b.jsonl", at)
    after = dataset(tmp_path).fingerprint()
    assert [k for k in before if before[k] != after[k]] == ["content"]


def test_the_fingerprint_changes_when_shards_are_added_renamed_or_swapped(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    write_jsonl(tmp_path / "b.jsonl", ["y"])
    prints = [dataset(tmp_path).fingerprint()]
    write_jsonl(tmp_path / "c.jsonl", ["z"])
    prints.append(dataset(tmp_path).fingerprint())
    (tmp_path / "c.jsonl").rename(tmp_path / "d.jsonl")
    prints.append(dataset(tmp_path).fingerprint())
    write_jsonl(tmp_path / "a.jsonl", ["y"])
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    prints.append(dataset(tmp_path).fingerprint())
    assert len({tuple(p.values()) for p in prints}) == 4


class CountingFs:
    """A file system that counts the bytes read through it."""

    def __init__(self, fs):
        self._fs = fs
        self.read = 0

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.read += end - start
        return self._fs.cat_file(path, start=start, end=end)


def test_the_fingerprint_of_a_large_dataset_samples_it_and_finds_an_edit_of_much_of_it(
    tmp_path, monkeypatch
):
    size = 40 << 20
    for name in ("a.jsonl", "b.jsonl"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    data = dataset(tmp_path)
    fs = CountingFs(data.fs)
    monkeypatch.setattr(data, "fs", fs)
    before = data.fingerprint()
    assert fs.read == 1 << 20
    with open(tmp_path / "b.jsonl", "r+b") as file:
        for at in np.arange(0, size, 5_000).tolist():
            file.seek(at)
            file.write(b"x")
    assert dataset(tmp_path).fingerprint() != before
