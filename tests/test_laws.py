"""The laws of the stream, over random data, recipes, rank counts and restarts."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import Run, assert_same_stream, global_batches, make_pipeline
from tests.toys import byte_ids, byte_tokenizer, write_jsonl, write_parquet
from torchtitan_zephon.lane import Cursor
from torchtitan_zephon.ops.documents import IGNORE_LABEL
from torchtitan_zephon.pipeline import Pipeline

laws = settings(deadline=None, max_examples=40)

# Lengths from nothing to many rows, so that documents and rows end in every way.
texts = st.lists(st.text(alphabet="abé\n ", max_size=60), min_size=1, max_size=40)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A ``[zephon]`` table whose datasets still hold their texts under ``path``."""
    count = draw(st.integers(1, 3))
    return {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "lanes": draw(st.integers(1, 9)),
        "datasets": [
            {
                "name": f"d{i}",
                # One document of several tokens at least, so that no dataset is barren.
                "path": draw(texts.map(lambda some: [*some, "four"])),
                "format": draw(st.sampled_from(["jsonl", "parquet"])),
                "weight": draw(st.sampled_from([1, 0.1, 0.7, 3, 0.333333333])),
            }
            for i in range(count)
        ],
        "packing": {
            "algorithm": draw(st.sampled_from(["wrap", "first_fit"])),
            "open_bins": draw(st.integers(1, 4)),
        },
        "shuffle": {
            "buffer_size": draw(st.integers(0, 40)),
            "order": draw(st.sampled_from(["random", "sequential"])),
        },
    }


@st.composite
def run_plans(draw: st.DrawFn) -> tuple[int, list[Run]]:
    """A global batch and stretches of training on rank counts that divide it."""
    batch = draw(st.sampled_from([1, 4, 6, 12, 18]))
    runs = []
    for _ in range(draw(st.integers(1, 4))):
        ranks = draw(st.sampled_from(divisors(batch)))
        micro_batch = draw(st.sampled_from(divisors(batch // ranks)))
        runs.append(Run(ranks=ranks, steps=draw(st.integers(0, 4)), micro_batch=micro_batch))
    return batch, runs


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: hypothesis runs one test many times, and each run wants a folder of its own.
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


def write_data(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The table with its texts written to files, in two shards where there are enough."""
    datasets = []
    for dataset in table["datasets"]:
        some, path = dataset["path"], Path(tempfile.mkdtemp(dir=folder))
        write = write_jsonl if dataset["format"] == "jsonl" else small_row_groups
        for shard, part in enumerate([some[: len(some) // 2], some[len(some) // 2 :]]):
            if part:
                write(path / f"{shard}.{dataset['format']}", part)
        datasets.append({**dataset, "path": str(path)})
    return {**table, "datasets": datasets}


def small_row_groups(path: Path, some: list[str]) -> Path:
    return write_parquet(path, some, row_group_size=3)


def pipeline_of(
    table: dict[str, Any], folder: Path, tokenizer: Path, seq_len: int, **changes: Any
) -> Pipeline:
    return make_pipeline(write_data(table, folder), seq_len=seq_len, tokenizer=tokenizer, **changes)


@laws
@given(table=recipes(), plan=run_plans(), seq_len=st.integers(1, 33))
def test_global_batches_are_the_same_at_every_rank_count_micro_batch_and_restart_pattern(
    table: dict[str, Any], plan: tuple[int, list[Run]], seq_len: int, tokenizer: Path
) -> None:
    batch, runs = plan
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        assert_same_stream(pipeline, batch=batch, runs=runs)


def test_every_divisor_of_the_global_batch_gives_the_same_batches_also_more_ranks_than_lanes(
    tokenizer: Path, folder: Path
) -> None:
    table = {
        "lanes": 5,
        "datasets": [{"name": "a", "path": ["x" * n for n in range(80)], "format": "jsonl"}],
        "shuffle": {"buffer_size": 15},
    }
    pipeline = pipeline_of(table, folder, tokenizer, 16)
    for ranks in (1, 2, 3, 4, 6, 8, 12, 24):
        assert_same_stream(pipeline, batch=24, runs=[Run(ranks, 4), Run(3, 2), Run(ranks, 3)])


@laws
@given(table=recipes(), seq_len=st.integers(1, 33))
def test_starting_afresh_from_any_cursor_equals_going_on_in_memory(
    table: dict[str, Any], seq_len: int, tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        for number in range(pipeline.lanes):
            going_on = pipeline.lane(pipeline.start(number))
            for _ in range(4):
                cursor = Cursor.from_json(going_on.cursor.to_json(), number)
                afresh = pipeline.lane(cursor)
                want, got = going_on.produce(7), afresh.produce(7)
                for name in ("inputs", "labels", "positions", "pieces"):
                    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
                assert afresh.cursor == going_on.cursor


@laws
@given(table=recipes(), seq_len=st.integers(1, 33))
def test_tokens_read_are_tokens_trained_plus_those_that_wait_and_padding_is_counted(
    table: dict[str, Any], seq_len: int, tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        lane = pipeline.lane(pipeline.start(0))
        trained = padded = 0
        for _ in range(5):
            rows = lane.produce(4)
            in_pieces = int((rows.pieces[:, 7] - rows.pieces[:, 6]).sum())
            labelled = int(np.count_nonzero(rows.labels != IGNORE_LABEL))
            assert in_pieces == labelled
            trained += labelled
            padded += rows.labels.size - labelled
            read = sum(at[3] for _, at in lane.cursor.positions)
            waiting = sum(r.stop - r.start for row in lane.cursor.unfinished for r in row)
            assert read == trained + waiting
            assert lane.cursor.padding == padded
        if table["packing"]["algorithm"] == "wrap":
            assert padded == 0


@laws
@given(table=recipes(), seq_len=st.integers(1, 33))
def test_every_row_is_the_text_that_its_pieces_name_and_no_label_crosses_a_document(
    table: dict[str, Any], seq_len: int, tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        known = [{tuple(byte_ids(t)) for t in d["path"]} for d in table["datasets"]]
        lane = pipeline.lane(pipeline.start(0))
        rows = lane.produce(6)
        for row, column, dataset, ordinal, block, at, start, stop in rows.pieces.tolist():
            document = lane._feeds[dataset].read(ordinal, block).document(at)
            assert tuple(document.tolist()) in known[dataset]
            here = slice(column, column + stop - start)
            np.testing.assert_array_equal(rows.inputs[row, here], document[start:stop])
            np.testing.assert_array_equal(rows.labels[row, here], document[start + 1 : stop + 1])
            np.testing.assert_array_equal(rows.positions[row, here], np.arange(stop - start))


@laws
@given(table=recipes())
def test_over_all_lanes_each_document_is_seen_once_an_epoch(
    table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "datasets": table["datasets"][:1]}
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, 200)
        seen: Counter[tuple[int, ...]] = Counter()
        chunks = pipeline.datasets[0].num_chunks
        for number in range(pipeline.lanes):
            lane = pipeline.lane(pipeline.start(number))
            feed = lane._feeds[0]
            while (block := feed.block()) is not None:
                epoch = (number + block.ordinal * pipeline.lanes) // chunks
                if epoch > 0:
                    break
                seen.update(tuple(block.document(i).tolist()) for i in range(len(block)))
                feed.position.row = len(block)
        assert seen == Counter(tuple(byte_ids(t)) for t in table["datasets"][0]["path"])


@laws
@given(table=recipes(), seq_len=st.integers(4, 33))
def test_token_shares_are_within_one_document_of_the_weights_at_every_segment(
    table: dict[str, Any], seq_len: int, tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        weights = [d["weight"] for d in table["datasets"]]
        longest = [max(len(byte_ids(t)) - 1 for t in d["path"]) for d in table["datasets"]]
        lane = pipeline.lane(pipeline.start(0))
        for _ in range(6):
            lane.produce(5)
            quotients = [
                at[3] / w for (_, at), w in zip(lane.cursor.positions, weights, strict=True)
            ]
            # A dataset is drawn from only while its quotient is the smallest, so it leads the
            # others by less than one document of its own.
            for q, w, most in zip(quotients, weights, longest, strict=True):
                assert q - min(quotients) <= most / w + 1e-9


RUNTIMES = [
    {"threads": 3},
    {"prefetch_steps": 1},
    {"prefetch_steps": 7},
    {"tokenizer_backend": "tokenizers"},
    {"tokenizer_backend": "gigatoken"},
]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("algorithm", ["wrap", "first_fit"])
def test_no_runtime_setting_changes_a_byte(
    runtime: dict[str, Any], algorithm: str, tokenizer: Path, folder: Path
) -> None:
    table = write_data(
        {
            "datasets": [
                {"name": "a", "path": ["ab" * n for n in range(50)], "format": "jsonl"},
                {"name": "b", "path": ["é" * n for n in range(70)], "format": "parquet"},
            ],
            "packing": {"algorithm": algorithm},
            "shuffle": {"buffer_size": 20},
        },
        folder,
    )
    plain = make_pipeline(table, seq_len=32, tokenizer=tokenizer, batch=6)
    changed = make_pipeline(table, seq_len=32, tokenizer=tokenizer, batch=6, runtime=runtime)
    runs = [Run(2, 5), Run(3, 5)]
    assert changed.fingerprint == plain.fingerprint
    assert global_batches(changed, batch=6, runs=runs) == global_batches(plain, batch=6, runs=runs)


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit"])
def test_what_waits_in_a_lane_does_not_grow_with_the_length_of_the_run(
    algorithm: str, tokenizer: Path, folder: Path
) -> None:
    """Also not where documents are very unequally long, from one byte to many rows."""
    some = ["x" * (n % 5 + 1) for n in range(100)] + ["y" * 300, "z" * 37] * 10
    table = {
        "lanes": 2,
        "datasets": [{"name": "a", "path": some, "format": "jsonl"}],
        "packing": {"algorithm": algorithm, "open_bins": 4},
    }
    pipeline = pipeline_of(table, folder, tokenizer, 32)
    for number in range(2):
        lane = pipeline.lane(pipeline.start(number))
        for _ in range(300):
            lane.produce(8)
            unfinished = lane.cursor.unfinished
            # wrap: the tail of one document. first_fit: four open rows and the rest of a document,
            # and in a row at most 16 documents of two pairs.
            assert len(unfinished) <= (1 if algorithm == "wrap" else 5)
            assert all(len(row) <= 16 for row in unfinished)
