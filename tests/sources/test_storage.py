"""Finding shards: files, folders, globs and URLs, and the words in which nothing is refused."""

from pathlib import Path

import fsspec
import pytest

from torchtitan_zephon.sources.storage import Shard, SourceError, find_shards, read_range

SUFFIXES = (".jsonl", ".parquet")


def put(root: Path, *names: str, data: bytes = b"x\n") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def names(path: object) -> list[str]:
    return [shard.name for shard in find_shards(str(path), SUFFIXES)[1]]


def refusal(path: object) -> str:
    with pytest.raises(SourceError) as caught:
        find_shards(str(path), SUFFIXES)
    return str(caught.value)


def test_a_folder_is_searched_at_any_depth_in_the_order_of_names(tmp_path):
    put(tmp_path, "b.jsonl", "a/z.jsonl", "a/c/d.parquet", "a.jsonl", "B.jsonl")
    assert names(tmp_path) == ["B.jsonl", "a.jsonl", "a/c/d.parquet", "a/z.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/") == names(tmp_path)


def test_hidden_files_and_folders_and_other_endings_are_passed_over(tmp_path):
    put(tmp_path, "a.jsonl", ".b.jsonl", "_c.jsonl", ".git/d.jsonl", "_tmp/e/f.jsonl", "readme.md")
    assert names(tmp_path) == ["a.jsonl"]


def test_a_dataset_may_lie_below_a_hidden_folder(tmp_path):
    put(tmp_path / ".cache/_data", "a.jsonl")
    assert names(tmp_path / ".cache/_data") == ["a.jsonl"]


def test_a_file_is_taken_whatever_its_name(tmp_path):
    put(tmp_path, "_corpus.txt", data=b"12345")
    fs, shards = find_shards(str(tmp_path / "_corpus.txt"), SUFFIXES)
    assert [(s.name, s.size) for s in shards] == [("_corpus.txt", 5)]
    assert fs.cat_file(shards[0].path) == b"12345"


def test_a_glob_names_shards_below_its_fixed_part(tmp_path):
    put(tmp_path, "a/x.jsonl", "b/x.jsonl", "b/c/y.jsonl", "b/z.txt")
    assert names(tmp_path / "*/x.jsonl") == ["a/x.jsonl", "b/x.jsonl"]
    assert names(tmp_path / "**/*.jsonl") == ["a/x.jsonl", "b/c/y.jsonl", "b/x.jsonl"]
    assert names(tmp_path / "b/?.jsonl") == ["x.jsonl"]


def test_a_glob_passes_over_hidden_files_as_a_folder_does(tmp_path):
    put(tmp_path, "a.jsonl", "_b.jsonl", ".git/d.jsonl")
    assert names(tmp_path / "**/*.jsonl") == ["a.jsonl"]


def test_a_url_is_read_through_fsspec():
    fs = fsspec.filesystem("memory")
    fs.pipe({"/storage/b.jsonl": b"22", "/storage/a/c.jsonl": b"1", "/storage/_h.jsonl": b"3"})
    try:
        found, shards = find_shards("memory://storage", SUFFIXES)
        assert [(s.name, s.size) for s in shards] == [("a/c.jsonl", 1), ("b.jsonl", 2)]
        assert read_range(found, shards[1], 1, 9) == b"2"
        assert names("memory://storage/a/*.jsonl") == ["c.jsonl"]
        assert names("memory://storage/b.jsonl") == ["b.jsonl"]
    finally:
        fs.rm("/storage", recursive=True)


def test_nothing_there_is_refused_by_path(tmp_path):
    assert refusal(tmp_path / "no.jsonl") == f"path '{tmp_path}/no.jsonl': no such file or folder"


def test_a_glob_without_a_match_is_refused(tmp_path):
    assert refusal(tmp_path / "*.jsonl") == f"path '{tmp_path}/*.jsonl': no file matches this glob"


def test_a_folder_without_a_shard_is_refused_with_the_endings_looked_for(tmp_path):
    put(tmp_path, "readme.md")
    assert refusal(tmp_path) == (
        f"path '{tmp_path}': no shard in this folder; files ending in .jsonl or .parquet are "
        "looked for"
    )


def test_a_glob_that_matches_a_folder_is_refused(tmp_path):
    put(tmp_path, "a.jsonl", "sub/b.jsonl")
    assert refusal(tmp_path / "*").startswith(
        f"path '{tmp_path}/*': the glob matches the folder '{tmp_path}/sub'; it must match files"
    )


def test_shards_of_0_bytes_are_refused_and_counted(tmp_path):
    put(tmp_path, "a.jsonl")
    put(tmp_path, "b.jsonl", data=b"")
    assert refusal(tmp_path).endswith(f"the shard '{tmp_path}/b.jsonl' has 0 bytes; remove it")
    put(tmp_path, "c.jsonl", "d.jsonl", data=b"")
    assert f"'{tmp_path}/b.jsonl' (and 2 more) has 0 bytes" in refusal(tmp_path)


def test_a_protocol_that_nobody_knows_is_refused():
    assert refusal("nosuch://bucket/a.jsonl") == (
        "path 'nosuch://bucket/a.jsonl': Protocol not known: nosuch"
    )


def test_read_range_gives_the_bytes_that_are_there(tmp_path):
    put(tmp_path, "a.jsonl", data=b"0123456789")
    fs, (shard,) = find_shards(str(tmp_path), SUFFIXES)
    assert read_range(fs, shard, 3, 6) == b"345"
    assert read_range(fs, shard, 8, 99) == b"89"
    assert read_range(fs, shard, -5, 2) == b"01"
    assert read_range(fs, shard, 10, 20) == b""
    assert read_range(fs, shard, 5, 5) == b""


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    put(tmp_path, "a.jsonl", data=b"0123")
    fs, _ = find_shards(str(tmp_path), SUFFIXES)
    shard = Shard(path=str(tmp_path / "a.jsonl"), name="a.jsonl", size=10)
    with pytest.raises(SourceError, match="2 bytes came back for bytes 2 to 8: .* the 10 bytes"):
        read_range(fs, shard, 2, 8)
