"""A lane's walk over a dataset: each document once an epoch, from any place, to a clear end."""

from collections import Counter
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toys import write_jsonl, write_parquet
from torchtitan_zephon.ops.worker import Worker
from torchtitan_zephon.recipe import DatasetConfig
from torchtitan_zephon.sources.dataset import Dataset
from torchtitan_zephon.sources.feed import Feed, Position, Walk
from torchtitan_zephon.sources.storage import SourceError


def utf8(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The toy tokenizer: one byte one token, nothing added."""
    data = [t.encode() for t in texts]
    bounds = np.cumsum([0, *map(len, data)], dtype=np.int64)
    return np.frombuffer(b"".join(data), dtype=np.uint8).astype(np.int32), bounds


def opened(path: Path, lanes: int = 1) -> Dataset:
    return Dataset(DatasetConfig(name="web", path=str(path)), lanes)


def feed(
    data: Dataset,
    lane: int = 0,
    lanes: int = 1,
    *,
    seed: int = 1,
    random_order: bool = True,
    passes: int | None = 1,
    position: Position | None = None,
    empty: int = 0,
    executor: Executor | None = None,
) -> Feed:
    walk = Walk(
        dataset=data,
        lane=lane,
        lanes=lanes,
        seed=seed,
        random_order=random_order,
        passes=passes,
        endless=False,
        worker=Worker((), None, utf8),
    )
    return Feed(walk, position or Position(), (empty, 0), executor)


def draw(walk: Feed, limit: int = 10**9) -> list[str]:
    """The next texts, one by one as a mixture draws them, up to the end or ``limit``."""
    out: list[str] = []
    while len(out) < limit and (block := walk.block()) is not None:
        out.append(bytes(block.document(walk.position.row).astype(np.uint8)).decode())
        walk.position.row += 1
    return out


def numbered(count: int) -> list[str]:
    return [f"document {i} " + "." * (i * 7 % 50) for i in range(count)]


@pytest.mark.parametrize("lanes", [1, 3, 5, 23])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_each_document_is_seen_once_in_an_epoch_over_all_lanes(tmp_path, write, lanes):
    end = write.__name__.removeprefix("write_")
    write(tmp_path / f"a.{end}", numbered(100))
    write(tmp_path / f"b.{end}", numbered(7))
    data = opened(tmp_path, lanes)
    seen = Counter(t for lane in range(lanes) for t in draw(feed(data, lane, lanes)))
    assert seen == Counter(numbered(100) + numbered(7))


def test_lanes_without_a_chunk_in_an_epoch_take_from_the_next_one(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), lanes=4)
    assert data.num_chunks == 1
    assert [draw(feed(data, lane, 4)) for lane in (1, 2, 3)] == [[], [], []]
    walks = [draw(feed(data, lane, 4, passes=8)) for lane in range(4)]
    assert [Counter(w) for w in walks] == [Counter({"one": 2, "two": 2})] * 4


@settings(deadline=None, max_examples=25)
@given(
    shards=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    lanes=st.integers(1, 12),
    passes=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    random_order=st.booleans(),
)
def test_passes_over_any_dataset_give_each_document_that_many_times(
    tmp_path_factory, shards, lanes, passes, seed, random_order
):
    folder = tmp_path_factory.mktemp("d")
    texts = []
    for number, count in enumerate(shards):
        part = [f"{number}:{i}" + "x" * (i * 31 % 97) for i in range(count)]
        write_jsonl(folder / f"{number}.jsonl", part)
        texts += part
    data = opened(folder, lanes)
    seen = Counter(
        text
        for lane in range(lanes)
        for text in draw(
            feed(data, lane, lanes, passes=passes, seed=seed, random_order=random_order)
        )
    )
    assert seen == Counter(dict.fromkeys(texts, passes))


def test_sequential_order_is_the_order_of_the_files(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", numbered(200))
    write_jsonl(tmp_path / "a.jsonl", ["first", "second"])
    data = opened(tmp_path)
    assert data.num_chunks > 3
    assert draw(feed(data, random_order=False)) == ["first", "second", *numbered(200)]


def test_random_order_differs_by_epoch_and_by_seed_and_is_the_same_again(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", numbered(300)))
    both = draw(feed(data, passes=2))
    first, second = both[:300], both[300:]
    assert sorted(first) == sorted(second) == sorted(numbered(300))
    assert len({tuple(numbered(300)), tuple(first), tuple(second)}) == 3
    other = draw(feed(data, seed=2))
    assert sorted(other) == sorted(first)
    assert other != first
    assert draw(feed(data)) == first


def test_random_order_mixes_both_chunks_and_documents_inside_a_chunk(tmp_path):
    count = 3000
    data = opened(write_jsonl(tmp_path / "a.jsonl", numbered(count)), lanes=20)
    assert data.num_chunks > 100
    places = {text: i for i, text in enumerate(numbered(count))}
    order = [places[text] for text in draw(feed(data))]
    stays = sum(b == a + 1 for a, b in zip(order, order[1:], strict=False))
    assert stays < 0.1 * count  # about 1 in 20 is expected, as a chunk has some 20 documents
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.25


def test_each_epoch_has_its_own_order_of_chunks_and_of_documents_in_a_chunk(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", numbered(300)), lanes=4)
    chunk_of = {t: c for c in range(data.num_chunks) for t in next(data.blocks(c))}
    both = draw(feed(data, passes=2))
    epochs = [both[:300], both[300:]]
    chunks = [list(dict.fromkeys(chunk_of[t] for t in epoch)) for epoch in epochs]
    assert sorted(chunks[0]) == sorted(chunks[1]) == list(range(data.num_chunks))
    assert chunks[0] != chunks[1]
    for chunk in range(data.num_chunks):
        first, second = ([t for t in epoch if chunk_of[t] == chunk] for epoch in epochs)
        assert len(first) > 5
        assert first != second


def test_without_passes_the_walk_goes_on_for_ever(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", numbered(10)))
    walk = draw(feed(data, passes=None), 57)
    assert [Counter(walk[i : i + 10]) for i in range(0, 50, 10)] == [Counter(numbered(10))] * 5


@pytest.mark.parametrize("random_order", [True, False])
@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_a_walk_from_any_position_gives_the_rest(tmp_path, end, random_order):
    if end == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", numbered(70))
    else:
        write_parquet(tmp_path / "a.parquet", [f"{i} " + "x" * 90_000 for i in range(12)])
    data = opened(tmp_path)

    def walk_from(position: Position | None = None) -> Feed:
        return feed(data, passes=2, random_order=random_order, position=position)

    every = draw(walk_from())
    assert len(every) in (140, 24)
    for count in range(len(every) + 1):
        walk = walk_from()
        assert draw(walk, count) == every[:count]
        at = walk.position
        again = walk_from(Position(at.ordinal, at.block, at.row))
        assert draw(again) == every[count:]


def test_a_walk_saved_after_its_end_has_nothing_left(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", ["one", "two", "a"]))
    walk = feed(data)
    assert sorted(draw(walk)) == ["one", "two"]
    assert (walk.block(), walk.empty) == (None, 1)
    again = feed(data, position=walk.position, empty=walk.empty)
    assert (draw(again), again.empty) == ([], 1)


def test_empty_documents_are_left_out_and_counted_once_wherever_the_walk_resumes(tmp_path):
    texts = [t for i in range(40) for t in ("", f"document {i}", "a")]
    data = opened(write_jsonl(tmp_path / "a.jsonl", texts))
    every = draw(feed(data))
    assert sorted(every) == sorted(t for t in texts if len(t) > 1)
    for count in range(41):
        walk = feed(data)
        draw(walk, count)
        again = feed(data, position=walk.position, empty=walk.empty)
        assert draw(again) == every[count:]
        assert again.empty == 80


def test_a_block_names_its_place_and_bounds(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", ["ab", "", "cde"]))
    block = feed(data, random_order=False).block()
    assert block is not None
    assert (block.ordinal, block.number, block.empty, len(block)) == (0, 0, 1, 2)
    assert block.tokens.tolist() == [97, 98, 99, 100, 101]
    assert block.bounds.tolist() == [0, 2, 5]
    assert block.document(1).tolist() == [99, 100, 101]


def test_any_block_can_be_read_again_and_a_missing_one_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", [f"{i} " + "x" * 90_000 for i in range(10)])
    data = opened(tmp_path)
    walk = feed(data, passes=None)
    draw(walk, 15)
    for ordinal, number in [(0, 0), (0, 1), (1, 1), (walk.position.ordinal, walk.position.block)]:
        block = walk.read(ordinal, number)
        assert (block.ordinal, block.number) == (ordinal, number)
        assert len(block) > 0
    before = draw(walk, 5)
    assert before == draw(feed(data, passes=None), 20)[15:]
    with pytest.raises(SourceError, match="dataset 'web', lane 0: block 99 of chunk 1, where"):
        walk.read(1, 99)


def test_a_position_past_the_documents_of_its_block_is_an_error(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]))
    with pytest.raises(SourceError, match="stands at document 3 of a block that has 2 now"):
        feed(data, position=Position(row=3)).block()


def test_a_position_in_a_block_that_is_not_there_any_more_is_an_error(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]))
    with pytest.raises(SourceError, match="the data changed"):
        feed(data, passes=None, position=Position(ordinal=0, block=5, row=2)).block()


def test_a_dataset_without_any_document_is_an_error_and_no_endless_search(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" * 3000)
    with pytest.raises(SourceError, match="dataset 'web': .* gave no document of two tokens"):
        feed(opened(tmp_path), passes=None).block()


def test_a_dataset_of_empty_documents_is_an_error_and_no_endless_search(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", ["", "a", ""]))
    with pytest.raises(SourceError, match="remove the dataset, or check its text_field"):
        feed(data, passes=None).block()
    assert feed(data, passes=1).block() is None


def test_an_executor_changes_nothing(tmp_path):
    data = opened(write_jsonl(tmp_path / "a.jsonl", numbered(200)))
    with ThreadPoolExecutor(2) as executor:
        walk = feed(data, passes=3, executor=executor)
        assert draw(walk) == draw(feed(data, passes=3))


def test_an_error_in_the_executor_reaches_whoever_draws(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' * 100 + b'{"text": 1}\n')
    with ThreadPoolExecutor(2) as executor:
        walk = feed(opened(tmp_path), random_order=False, executor=executor)
        with pytest.raises(SourceError, match="line 101"):
            draw(walk)


def test_a_walk_that_waits_holds_no_text(tmp_path: Path) -> None:
    """What a generator has in a variable lives as long as the block is used, in every lane."""
    for data in (
        write_jsonl(tmp_path / "a.jsonl", [f"text {n}" for n in range(50)]),
        write_parquet(tmp_path / "a.parquet", [f"text {n}" for n in range(50)], 9),
    ):
        dataset = opened(data)
        shard, part, parts = dataset.place_of(0)
        size, wanted = dataset.chunk_bytes, dataset.wanted
        readings: list[Any] = [
            dataset._reader.read_blocks(dataset.fs, shard, part, parts, size, wanted),
            feed(dataset).walk.blocks(0, 0),
        ]
        for reading in readings:
            assert next(reading)
            held = reading.gi_frame.f_locals.values()
            assert not any(isinstance(v, bytes) for v in held)
            assert not any(isinstance(x, str) for v in held if isinstance(v, list) for x in v)
