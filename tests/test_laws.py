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

from tests.helpers import (
    Run,
    assert_same_stream,
    batch_streams,
    global_batches,
    make_pipeline,
)
from tests.toys import byte_ids, byte_tokenizer, write_jsonl, write_parquet
from torchtitan_zephon.lane import Cursor
from torchtitan_zephon.ops.documents import IGNORE_LABEL
from torchtitan_zephon.pipeline import Pipeline

laws = settings(deadline=None, max_examples=40)

# Lengths from nothing to many rows, so that documents and rows end in every way.
texts = st.lists(st.text(alphabet="abé\n ", max_size=60), min_size=1, max_size=40)


ALGORITHMS = ["wrap", "first_fit", "best_fit", "best_fit_wrap", "none"]


@st.composite
def packings(draw: st.DrawFn) -> dict[str, Any]:
    """A ``[zephon.packing]`` table: any algorithm with any of its settings."""
    algorithm = draw(st.sampled_from(ALGORITHMS))
    packing: dict[str, Any] = {"algorithm": algorithm, "open_bins": draw(st.integers(1, 4))}
    if algorithm != "wrap":
        packing["max_documents"] = draw(st.sampled_from([0, 0, 1, 2, 5]))
        packing["homogeneous"] = draw(st.sampled_from(["off", "full", "group"]))
    if algorithm in ("first_fit", "best_fit", "none"):
        packing["long_documents"] = draw(st.sampled_from(["split", "truncate", "drop"]))
    return packing


@st.composite
def phases(draw: st.DrawFn, names: list[str]) -> list[dict[str, Any]]:
    """``[[zephon.phases]]`` tables, soon enough to be reached, each with some of the datasets."""
    starts = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=2, unique=True))
    some = st.lists(st.sampled_from(names), min_size=1, unique=True)
    return [
        {"from_tokens": start, "weights": {name: draw(WEIGHTS) for name in draw(some)}}
        for start in sorted(starts)
    ]


WEIGHTS = st.sampled_from([1, 0.1, 0.7, 3, 0.333333333])


@st.composite
def recipes(draw: st.DrawFn, finite: bool = False) -> dict[str, Any]:
    """A ``[zephon]`` table whose datasets still hold their texts under ``path``."""
    packing = draw(packings())
    drops = packing.get("long_documents") == "drop"
    names = [f"d{i}" for i in range(draw(st.integers(1, 3)))]
    table: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "lanes": draw(st.integers(1, 9)),
        "datasets": [
            {
                "name": name,
                # One document of several tokens at least, so that no dataset is barren. Where long
                # ones are dropped, also many that fit into any row.
                "path": [
                    fits
                    for text in [*draw(texts), "four"]
                    for fits in ([text, ""] if drops else [text])
                ],
                "format": draw(st.sampled_from(["jsonl", "parquet"])),
                "weight": draw(WEIGHTS),
                "group": draw(st.sampled_from(["x", "y"])),
            }
            for name in names
        ],
        "packing": packing,
        "shuffle": {
            "buffer_size": draw(st.integers(0, 40)),
            # In the files' order a lane may go round in the same few chunks, with none that fits.
            "order": "random" if drops else draw(st.sampled_from(["random", "sequential"])),
        },
    }
    if finite:
        table["passes"] = draw(st.integers(1, 2))
        table["on_exhausted"] = draw(st.sampled_from(["drop", "stop", "repeat"]))
        if table["on_exhausted"] == "drop":
            table["work_source"] = draw(st.sampled_from(["weights", "sequential"]))
        return table
    kind = draw(st.sampled_from(["weights", "weights", "phases", "sequential"]))
    if kind == "phases":
        table["phases"] = draw(phases(names))
    else:
        # The last dataset never ends, so the run does not.
        table["work_source"] = kind
        for dataset in table["datasets"][:-1]:
            dataset["passes"] = draw(st.sampled_from([0, 0, 1, 2]))
    return table


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
                for name in ("sequences", "pieces"):
                    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
                assert afresh.cursor == going_on.cursor


@laws
@given(table=recipes(), seq_len=st.integers(1, 33))
def test_tokens_read_are_tokens_trained_waiting_or_dropped_and_padding_is_counted(
    table: dict[str, Any], seq_len: int, tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        lane = pipeline.lane(pipeline.start(0))
        trained = padded = 0
        for _ in range(5):
            rows = lane.produce(4)
            in_pieces = int((rows.pieces[:, 7] - rows.pieces[:, 6]).sum())
            labels = rows.sequences[1]
            labelled = int(np.count_nonzero(labels != IGNORE_LABEL))
            assert in_pieces == labelled
            trained += labelled
            padded += labels.size - labelled
            read = sum(at[3] for _, at in lane.cursor.positions)
            waiting = sum(r.stop - r.start for row in lane.cursor.unfinished for r in row)
            assert lane.cursor.trained == trained
            assert read == trained + waiting + lane.cursor.dropped
            assert lane.cursor.padding == padded
        packing = table["packing"]
        if packing.get("long_documents", "split") == "split":
            assert lane.cursor.dropped == 0
        whole = packing.get("max_documents", 0) == 0 and packing.get("homogeneous", "off") == "off"
        if packing["algorithm"] == "wrap" or (packing["algorithm"] == "best_fit_wrap" and whole):
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
        inputs, labels, positions = rows.sequences
        for row, column, dataset, ordinal, block, at, start, stop in rows.pieces.tolist():
            document = lane.feeds[dataset].read(ordinal, block).document(at)
            assert tuple(document.tolist()) in known[dataset]
            here = slice(column, column + stop - start)
            np.testing.assert_array_equal(inputs[row, here], document[start:stop])
            np.testing.assert_array_equal(labels[row, here], document[start + 1 : stop + 1])
            np.testing.assert_array_equal(positions[row, here], np.arange(stop - start))


@laws
@given(table=recipes())
def test_over_all_lanes_each_document_is_seen_once_an_epoch(
    table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "datasets": table["datasets"][:1], "phases": []}
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, 200)
        seen: Counter[tuple[int, ...]] = Counter()
        chunks = pipeline.datasets[0].num_chunks
        for number in range(pipeline.lanes):
            lane = pipeline.lane(pipeline.start(number))
            feed = lane.feeds[0]
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
    names = [d["name"] for d in table["datasets"]]
    weights = [{d["name"]: d["weight"] for d in table["datasets"]}]
    if table.get("phases", []) and table["phases"][0]["from_tokens"] == 0:
        weights = []
    weights += [phase["weights"] for phase in table.get("phases", [])]
    longest = [max(len(byte_ids(t)) - 1 for t in d["path"]) for d in table["datasets"]]
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        lane = pipeline.lane(pipeline.start(0))
        for _ in range(6):
            lane.produce(5)
            drawn = [at[3] for _, at in lane.cursor.positions]
            left = [not feed.has_had_its_passes() for feed in lane.feeds]
            if table.get("work_source") == "sequential":
                # Nothing of a dataset before the one in front of it has ended.
                assert not any(drawn[left.index(True) + 1 :])
                continue
            now = weights[lane.cursor.phase]
            quotients = {
                i: (drawn[i] - lane.cursor.base[i]) / now[name]
                for i, name in enumerate(names)
                if name in now and left[i]
            }
            # A dataset is drawn from only while its quotient is the smallest, so it leads the
            # others by less than one document of its own.
            for i, quotient in quotients.items():
                most = longest[i] / now[names[i]]
                assert quotient - min(quotients.values()) <= most + 1e-9
            for i, name in enumerate(names):
                assert name in now or drawn[i] == lane.cursor.base[i]


@laws
@given(table=recipes(finite=True), ranks=st.sampled_from([2, 3]), seq_len=st.integers(4, 33))
def test_a_finite_run_ends_with_the_same_rows_at_every_rank_count_and_has_all_pairs(
    table: dict[str, Any], ranks: int, seq_len: int, tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        rows = finite_run(pipeline, ranks=1)
        np.testing.assert_array_equal(finite_run(pipeline, ranks=ranks), rows)
        ends = [end_of(pipeline, number) for number in range(pipeline.lanes)]
    assert all(end.unfinished == () for end in ends)
    trained, dropped = sum(end.trained for end in ends), sum(end.dropped for end in ends)
    read = sum(at[3] for end in ends for _, at in end.positions)
    assert read == trained + dropped
    assert np.count_nonzero(rows[:, 1] != IGNORE_LABEL) == trained
    if table["on_exhausted"] == "drop":
        once = sum(len(byte_ids(t)) - 1 for d in table["datasets"] for t in d["path"])
        assert read == table["passes"] * once


def finite_run(pipeline: Pipeline, *, ranks: int) -> np.ndarray:
    """All rows of a run in step order, int64 [rows, 3, seq_len]."""
    streams = batch_streams(pipeline, batch=6, run=Run(ranks, 0, 6 // ranks))
    shares = [list(stream) for stream in streams]
    for stream in streams:
        stream.close()
    # Every rank takes the same number of steps, or zip finds that one is short.
    steps = zip(*shares, strict=True)
    return np.concatenate([np.stack(part, axis=1) for step in steps for part in step])


def end_of(pipeline: Pipeline, number: int) -> Cursor:
    """The cursor behind the last row of a lane."""
    lane = pipeline.lane(pipeline.start(number))
    while len(lane.produce(pipeline.segment_rows)):
        pass
    return lane.cursor


RUNTIMES = [
    {"threads": 3},
    {"threads": 3, "runner": "inline"},
    {"prefetch_steps": 1},
    {"prefetch_steps": 7},
    {"tokenizer_backend": "tokenizers"},
    {"tokenizer_backend": "gigatoken"},
]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
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
            # wrap and none: the rest of one document. The others: that and four open rows, and in
            # a row at most 16 documents of two pairs, or 32 pieces where documents are split.
            assert len(unfinished) <= (1 if algorithm in ("wrap", "none") else 5)
            most = 32 if algorithm == "best_fit_wrap" else 16
            assert all(len(row) <= most for row in unfinished)


@laws
@given(table=recipes(), seq_len=st.integers(1, 33), sizes=st.lists(st.integers(1, 6), min_size=2))
def test_rows_do_not_depend_on_how_many_are_made_at_a_time(
    table: dict[str, Any], seq_len: int, sizes: list[int], tokenizer: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        for number in range(pipeline.lanes):
            whole = pipeline.lane(pipeline.start(number))
            parts = pipeline.lane(pipeline.start(number))
            want = whole.produce(sum(sizes))
            got = [parts.produce(size) for size in sizes]
            np.testing.assert_array_equal(
                np.concatenate([rows.sequences for rows in got], axis=1), want.sequences
            )
            for name in ("unfinished", "trained", "padding", "dropped", "phase", "base"):
                assert getattr(parts.cursor, name) == getattr(whole.cursor, name)


@laws
@given(table=recipes(), plan=run_plans(), seq_len=st.integers(1, 33), times=st.integers(1, 5))
def test_the_length_of_segments_changes_no_batch(
    table: dict[str, Any],
    plan: tuple[int, list[Run]],
    seq_len: int,
    times: int,
    tokenizer: Path,
) -> None:
    batch, runs = plan
    with tempfile.TemporaryDirectory() as folder:
        pipeline = pipeline_of(table, Path(folder), tokenizer, seq_len)
        short = assert_same_stream(pipeline, batch=batch, runs=runs)
        pipeline.segment_rows = times * pipeline.shuffled_rows
        assert assert_same_stream(pipeline, batch=batch, runs=runs) == short
