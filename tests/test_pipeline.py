"""Operators, phases, work sources and ends, in whole streams."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import user_functions
from tests.helpers import Run, assert_same_stream, batch_streams, make_pipeline
from tests.toys import byte_ids, byte_tokenizer, write_jsonl, write_parquet, write_tokens
from torchtitan_zephon.ops.documents import IGNORE_LABEL
from torchtitan_zephon.ops.functions import FunctionError, function_of
from torchtitan_zephon.pipeline import Pipeline
from torchtitan_zephon.recipe import RecipeError, parse_recipe

FUNCTIONS = "tests.user_functions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    write_jsonl(tmp_path / "a.jsonl", [f"a{n:03d}. " * (n % 9 + 1) for n in range(60)])
    write_parquet(tmp_path / "b.parquet", [f"b{n:03d}. " * (n % 5 + 1) for n in range(40)], 7)
    return {
        "seed": 3,
        "lanes": 4,
        "datasets": [
            {"name": "a", "path": str(tmp_path / "a.jsonl"), "weight": 0.7},
            {"name": "b", "path": str(tmp_path / "b.parquet"), "weight": 0.3},
        ],
        "shuffle": {"buffer_size": 16},
    }


PLAN = [Run(4, 2), Run(3, 0), Run(2, 2, 3), Run(6, 3)]


def operators(*named: tuple[str, str], **more: Any) -> list[dict[str, Any]]:
    return [{"kind": k, "function": f"{FUNCTIONS}:{name}", **more} for k, name in named]


def whole_run(pipeline: Pipeline, *, batch: int = 12, ranks: int = 1) -> np.ndarray:
    """All rows of a finite run, int64 [steps * batch, 3, seq_len], each rank's share in place."""
    streams = batch_streams(pipeline, batch=batch, run=Run(ranks, 0, batch // ranks))
    shares = [list(stream) for stream in streams]
    for stream in streams:
        stream.close()
    assert len({len(share) for share in shares}) == 1
    steps = zip(*shares, strict=True)
    return np.concatenate([np.stack(part, axis=1) for step in steps for part in step])


def documents_of(rows: np.ndarray, pipeline: Pipeline) -> Counter[str]:
    """The texts in rows whose every document is whole."""
    found: Counter[str] = Counter()
    for inputs, labels, positions in rows.tolist():
        starts = [i for i, p in enumerate(positions) if p == 0] + [len(inputs)]
        for lo, hi in zip(starts, starts[1:], strict=False):
            if labels[lo] != IGNORE_LABEL:
                found[pipeline.tokenizer.decode(inputs[lo + 1 : hi])] += 1
    return found


# -- operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        [("map", "shout")],
        [("filter", "is_short")],
        [("flat_map", "sentences")],
        [("flat_map", "sentences"), ("filter", "is_short"), ("map", "shout")],
    ],
)
@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit_wrap"])
def test_the_laws_hold_for_every_operator(
    steps: list[tuple[str, str]], algorithm: str, table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "operators": operators(*steps), "packing": {"algorithm": algorithm}}
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    assert_same_stream(pipeline, batch=12, runs=PLAN)


def test_functions_see_records_and_what_they_make_is_trained_on(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "d.jsonl", ["one. two", "three", "x" * 50])
    table = {
        "lanes": 1,
        "passes": 1,
        "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}],
        "operators": operators(("filter", "is_short"), ("flat_map", "sentences"), ("map", "shout")),
        "packing": {"algorithm": "none"},
    }
    pipeline = make_pipeline(table, seq_len=16, tokenizer=tokenizer)
    rows = whole_run(pipeline, batch=1)
    assert documents_of(rows, pipeline) == Counter(["ONE", " TWO", "THREE"])
    lane = pipeline.lane(pipeline.start(0))
    lane.produce(16)
    assert lane.cursor.left_out == ((0, 1),)  # none empty, one filtered


def test_an_operator_for_one_dataset_leaves_the_others_alone(
    table: dict[str, Any], tokenizer: Path
) -> None:
    table = {
        **table,
        "passes": 1,
        "operators": operators(("map", "shout"), datasets=["b"]),
        "packing": {"algorithm": "none"},
    }
    pipeline = make_pipeline(table, seq_len=64, tokenizer=tokenizer)
    texts = documents_of(whole_run(pipeline), pipeline)
    assert {t[0] for t in texts} == {"a", "B"}


@pytest.mark.parametrize("runtime", [{"runner": "inline", "threads": 3}, {"runner": "processes"}])
def test_the_runner_changes_no_byte(
    runtime: dict[str, Any], table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "operators": operators(("flat_map", "sentences"), ("filter", "is_short"))}
    plain = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    expected = assert_same_stream(plain, batch=12, runs=[Run(2, 3)])
    other = make_pipeline(table, seq_len=24, tokenizer=tokenizer, runtime={"threads": 2, **runtime})
    assert assert_same_stream(other, batch=12, runs=[Run(1, 3)]) == expected


def test_processes_are_gone_when_the_stream_is_closed(
    table: dict[str, Any], tokenizer: Path
) -> None:
    import multiprocessing

    table = {
        **table,
        "operators": operators(("map", "shout")),
        "runtime": {"runner": "processes", "threads": 2},
    }
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))
    next(stream)
    assert multiprocessing.active_children() != []
    stream.close()
    assert multiprocessing.active_children() == []


def test_processes_end_when_the_training_process_is_killed(
    table: dict[str, Any], tokenizer: Path, tmp_path: Path
) -> None:
    table = {
        **table,
        "operators": operators(("map", "shout")),
        "runtime": {"runner": "processes", "threads": 2},
    }
    script = tmp_path / "run.py"
    script.write_text(
        "import json, multiprocessing, sys, time\n"
        "from pathlib import Path\n"
        "from tests.helpers import Run, batch_streams, make_pipeline\n"
        "if __name__ == '__main__':\n"
        "    table, tokenizer = json.loads(sys.argv[1]), Path(sys.argv[2])\n"
        "    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)\n"
        "    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))\n"
        "    next(stream)\n"
        "    print(*(p.pid for p in multiprocessing.active_children()), flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), json.dumps(table), str(tokenizer)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    children = process.stdout.readline().split()
    assert len(children) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("runner", ["threads", "processes"])
def test_a_function_that_raises_names_itself_the_document_and_the_file(
    runner: str, table: dict[str, Any], tokenizer: Path
) -> None:
    table = {
        **table,
        "operators": operators(("map", "fails_on_seven")),
        "runtime": {"runner": runner},
    }
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))
    with pytest.raises(FunctionError) as error:
        list(stream)
    stream.close()
    message = str(error.value)
    assert "map tests.user_functions:fails_on_seven on record" in message
    assert "RuntimeError('seven')" in message
    assert ".jsonl" in message or ".parquet" in message
    assert "the record is {'text': " in message


def test_a_map_that_returns_no_record_is_told_what_to_do(
    table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "operators": operators(("map", "forgets_to_return"))}
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))
    with pytest.raises(FunctionError, match="returned a NoneType, not a record; to leave records"):
        next(stream)
    stream.close()


def test_functions_that_cannot_be_found_are_refused_at_start_all_at_once(
    table: dict[str, Any], tokenizer: Path
) -> None:
    named = [("map", "absent"), ("filter", "is_short")]
    table = {**table, "operators": operators(*named), "work_source": f"{FUNCTIONS}:shout"}
    table["operators"].append({"kind": "map", "function": "no_module_of_this_name:f"})
    table["operators"].append({"kind": "map", "function": "shout"})
    with pytest.raises(RecipeError) as error:
        make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    faults = error.value.faults
    assert [f.split(":")[0].split(" ")[0] for f in faults] == [
        "zephon.operators[0].function",
        "zephon.operators[2].function",
        "zephon.operators[3].function",
        "zephon.work_source",
    ]
    assert "has no attribute 'absent'" in faults[0]
    assert "expected 'module:function'" in faults[2]


def test_a_changed_function_is_another_recipe(table: dict[str, Any], tokenizer: Path) -> None:
    def pipeline(function: Callable[[dict[str, Any]], Any]) -> Pipeline:
        recipe = parse_recipe(table, seq_len=24, tokenizer_path=str(tokenizer))
        return Pipeline(recipe, functions=(function_of("map", function),))

    def upper(record: dict[str, Any]) -> dict[str, Any]:
        return {"text": record["text"].upper()}

    first = pipeline(upper)

    def upper(record: dict[str, Any]) -> dict[str, Any]:  # noqa: F811 - the point of the test
        return {"text": record["text"].upper() + "!"}

    assert pipeline(upper).fingerprint != first.fingerprint
    assert pipeline(user_functions.shout).fingerprint != first.fingerprint


def test_a_function_that_hangs_is_reported_with_the_document(
    table: dict[str, Any], tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def hang(record: dict[str, Any]) -> dict[str, Any]:
        release.wait(timeout=60)
        return record

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "training has waited" in record.getMessage():
                release.set()

    logger = logging.getLogger("torchtitan_zephon.stream")
    watch = Watch()
    logger.addHandler(watch)
    table = {**table, "runtime": {"stall_warning_seconds": 0.2}}
    recipe = parse_recipe(table, seq_len=24, tokenizer_path=str(tokenizer))
    pipeline = Pipeline(recipe, functions=(function_of("map", hang),))
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))
    next(stream)
    stream.close()
    logger.removeHandler(watch)
    assert "training has waited 0.2 s for data; now: map" in caplog.text
    assert "hang on record 0 of dataset 'a', block 0 of chunk" in caplog.text


# -- which dataset is next -------------------------------------------------------------------------


def test_phases_change_the_weights_exactly_and_resume_exactly_inside_each(
    table: dict[str, Any], tokenizer: Path
) -> None:
    phases = [
        {"from_tokens": 4000, "weights": {"a": 0.1, "b": 0.9}},
        {"from_tokens": 9000, "weights": {"b": 1.0}},
    ]
    pipeline = make_pipeline({**table, "phases": phases}, seq_len=24, tokenizer=tokenizer)
    lane = pipeline.lane(pipeline.start(0))
    longest = len(byte_ids("a000. " * 9)) - 1
    shares = {0: (0.7, 0.3), 1: (0.1, 0.9), 2: (0.0, 1.0)}
    seen = set()
    while lane.cursor.phase < 2 or sum(at[3] for _, at in lane.cursor.positions) < 3000:
        lane.produce(4)
        cursor = lane.cursor
        drawn = [at[3] for _, at in cursor.positions]
        inside = [d - b for d, b in zip(drawn, cursor.base, strict=True)]
        for got, share in zip(inside, shares[cursor.phase], strict=True):
            assert abs(got - share * sum(inside)) <= longest
        # A phase begins within a document of the lane's quarter of the tokens.
        start = (0, 1000, 2250)[cursor.phase]
        assert 0 <= sum(cursor.base) - start <= (longest if cursor.phase else 0)
        seen.add(cursor.phase)
    assert seen == {0, 1, 2}
    # 12 rows of 24 tokens a step: phase 1 begins in step 14, phase 2 in step 32.
    assert_same_stream(
        pipeline, batch=12, runs=[Run(2, 7), Run(4, 9), Run(3, 10), Run(1, 10), Run(6, 4)]
    )


def test_a_first_phase_from_0_tokens_on_may_leave_a_dataset_out_until_later(
    table: dict[str, Any], tokenizer: Path
) -> None:
    phases = [
        {"from_tokens": 0, "weights": {"a": 1}},
        {"from_tokens": 400, "weights": {"a": 1, "b": 1}},
    ]
    pipeline = make_pipeline({**table, "phases": phases}, seq_len=24, tokenizer=tokenizer)
    lane = pipeline.lane(pipeline.start(0))
    lane.produce(4)
    assert lane.cursor.positions[1] == ("b", (0, 0, 0, 0))
    lane.produce(20)
    assert lane.cursor.phase == 1
    assert lane.cursor.positions[1][1][3] > 0


@pytest.mark.parametrize("source", ["sequential", "Alternate", "LastFirst"])
def test_the_laws_hold_for_every_work_source(
    source: str, table: dict[str, Any], tokenizer: Path
) -> None:
    name = source if source == "sequential" else f"{FUNCTIONS}:{source}"
    table = {**table, "work_source": name}
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    assert_same_stream(pipeline, batch=12, runs=PLAN)


def test_the_sequential_source_draws_all_of_a_dataset_then_all_of_the_next(
    table: dict[str, Any], tokenizer: Path
) -> None:
    table = {
        **table,
        "lanes": 1,
        "passes": 1,
        "work_source": "sequential",
        "packing": {"algorithm": "none"},
        "shuffle": {"buffer_size": 0, "order": "sequential"},
    }
    pipeline = make_pipeline(table, seq_len=64, tokenizer=tokenizer)
    rows = whole_run(pipeline, batch=1)
    texts = [pipeline.tokenizer.decode(row[0, 1:5].tolist()) for row in rows]
    assert texts == [f"a{n:03d}" for n in range(60)] + [f"b{n:03d}" for n in range(40)]


def test_a_source_that_chooses_what_is_not_there_is_an_error(
    table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "work_source": f"{FUNCTIONS}:Mistaken"}
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))
    with pytest.raises(ValueError, match="Mistaken chose dataset 2, which has no document left"):
        next(stream)
    stream.close()


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit", "best_fit_wrap", "none"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
def test_a_finite_run_has_every_token_once_and_ends_on_all_ranks_together(
    ranks: int, algorithm: str, table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "lanes": 5, "passes": 1, "packing": {"algorithm": algorithm}}
    pipeline = make_pipeline(table, seq_len=24, tokenizer=tokenizer)
    one = whole_run(pipeline)
    pairs = sum(len(f"a{n:03d}. " * (n % 9 + 1)) + 1 for n in range(60))
    pairs += sum(len(f"b{n:03d}. " * (n % 5 + 1)) + 1 for n in range(40))
    assert np.count_nonzero(one[:, 1] != IGNORE_LABEL) == pairs
    # Each rank has its slice of each step, and all have the same number of steps.
    many = whole_run(pipeline, ranks=ranks)
    np.testing.assert_array_equal(many, one)


def test_a_finite_run_resumes_on_other_ranks_and_then_ends_where_it_would_have(
    table: dict[str, Any], tokenizer: Path
) -> None:
    pipeline = make_pipeline({**table, "lanes": 5, "passes": 2}, seq_len=24, tokenizer=tokenizer)
    steps = len(whole_run(pipeline)) // 12
    assert_same_stream(pipeline, batch=12, runs=[Run(4, 3), Run(3, steps - 5), Run(2, 2)])
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, steps, 12))
    assert len(list(stream)) == steps
    state = stream.state_dict()
    stream.close()
    (ended,) = batch_streams(pipeline, batch=12, run=Run(1, 0))
    ended.load_state_dict(state)
    assert list(ended) == []
    ended.close()


def counts(pipeline: Pipeline) -> dict[str, Counter[str]]:
    texts = documents_of(whole_run(pipeline), pipeline)
    return {name: Counter({t: n for t, n in texts.items() if t[0] == name}) for name in "ab"}


@pytest.mark.parametrize("lanes", [1, 4])
def test_what_happens_when_a_dataset_has_had_its_passes(
    lanes: int, table: dict[str, Any], tokenizer: Path
) -> None:
    table = {**table, "lanes": lanes, "packing": {"algorithm": "none"}}
    table["datasets"][0]["weight"] = 0.2  # a is the longer one: b is through long before it

    def run(**changes: Any) -> dict[str, Counter[str]]:
        return counts(make_pipeline({**table, **changes}, seq_len=64, tokenizer=tokenizer))

    dropped = run(passes=1)
    assert (dropped["a"].total(), dropped["b"].total()) == (60, 40)

    more = run(passes=1, datasets=[table["datasets"][0], {**table["datasets"][1], "passes": 3}])
    assert (more["a"].total(), set(more["b"].values())) == (60, {3})

    stopped = run(passes=1, on_exhausted="stop")
    assert 0 < stopped["a"].total() < 60
    assert stopped["b"].total() <= 40
    if lanes == 1:
        assert stopped["b"].total() == 40

    repeated = run(passes=1, on_exhausted="repeat")
    assert set(repeated["a"]) == set(dropped["a"])
    assert repeated["b"].total() > 40
    if lanes == 1:
        assert repeated["a"].total() == 60


def test_ten_documents_of_which_one_is_bad_end_every_rank_with_the_error(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["a document that is good " * 60] * 10)
    lines = path.read_text().splitlines(keepends=True)
    lines[6] = '{"text": 5}\n'
    path.write_text("".join(lines))
    table = {"lanes": 4, "passes": 1, "datasets": [{"name": "d", "path": str(path)}]}
    pipeline = make_pipeline(table, seq_len=64, tokenizer=tokenizer)
    for stream in batch_streams(pipeline, batch=4, run=Run(4, 0)):
        with pytest.raises(ValueError, match=r"d\.jsonl, line 7: Expected str, got int"):
            list(stream)
        stream.close()


def test_data_of_which_nearly_nothing_fits_is_an_error_and_no_endless_search(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "d.jsonl", ["much longer than a row"] * 10)
    table = {
        "lanes": 1,
        "datasets": [{"name": "d", "path": str(tmp_path / "d.jsonl")}],
        "packing": {"algorithm": "best_fit", "long_documents": "drop"},
        "shuffle": {"buffer_size": 2},
    }
    pipeline = make_pipeline(table, seq_len=8, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="nearly all documents are longer than a row"):
        pipeline.lane(pipeline.start(0)).produce(2)


# -- chat ------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eos|>{% endfor %}"


@pytest.fixture
def chat_table(tmp_path: Path) -> dict[str, Any]:
    folder = byte_tokenizer(tmp_path / "chat_tokenizer")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chats = [
        {
            "messages": [
                {"role": role, "content": f"{role[0]}{n} " * (n % 5 + 1)}
                for _ in range(n % 3 + 1)
                for role in ("user", "assistant")
            ]
        }
        for n in range(80)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return {
        "lanes": 4,
        "datasets": [{"name": "chats", "path": str(path)}],
        "tokenizer": {"path": str(folder)},
        "chat": {},
        "shuffle": {"buffer_size": 8},
    }


@pytest.mark.parametrize("packing", [None, "wrap", "first_fit", "best_fit_wrap", "none"])
def test_the_laws_hold_for_chats_in_every_packing(
    packing: str | None, chat_table: dict[str, Any], tokenizer: Path
) -> None:
    if packing is not None:
        chat_table["packing"] = {"algorithm": packing}
    pipeline = make_pipeline(chat_table, seq_len=96, tokenizer=tokenizer)
    assert pipeline.recipe.packing.algorithm == (packing or "best_fit")
    assert_same_stream(pipeline, batch=12, runs=PLAN)


def test_loss_is_on_what_the_assistant_says_and_chats_are_not_split_by_default(
    chat_table: dict[str, Any], tokenizer: Path
) -> None:
    pipeline = make_pipeline({**chat_table, "passes": 1}, seq_len=96, tokenizer=tokenizer)
    assert pipeline.recipe.packing.long_documents == "drop"
    rows = whole_run(pipeline)
    trained, whole = Counter(), 0
    for inputs, labels, positions in rows.tolist():
        for i, label in enumerate(labels):
            if label >= 2:
                trained[chr(label - 2)] += 1
            whole += positions[i] == 0 and inputs[i] == 0
    # Of "a12 " and "u12 " only the former's letters are labels.
    assert trained["a"] > 100
    assert trained["u"] == 0
    dropped = 80 - whole
    lanes = [pipeline.lane(pipeline.start(number)) for number in range(4)]
    for lane in lanes:
        while len(lane.produce(8)):
            pass
    assert dropped > 0
    assert sum(lane.cursor.dropped for lane in lanes) > 96 * dropped


def test_a_chat_that_cannot_be_read_is_an_error_with_its_file(
    chat_table: dict[str, Any], tokenizer: Path
) -> None:
    path = Path(chat_table["datasets"][0]["path"])
    path.write_text(path.read_text() + '{"messages": [{"role": "user", "content": "?"}]}\n')
    pipeline = make_pipeline(chat_table, seq_len=96, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=12, run=Run(1, 1))
    with pytest.raises(ValueError, match=r"chats\.jsonl: .*assistant"):
        list(stream)
    stream.close()


def test_resuming_with_many_open_documents_reads_each_of_their_blocks_once(
    table: dict[str, Any], tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_zephon.sources.feed import Feed

    table = {**table, "packing": {"algorithm": "best_fit", "open_bins": 64}}
    pipeline = make_pipeline(table, seq_len=256, tokenizer=tokenizer)
    lane = pipeline.lane(pipeline.start(0))
    lane.produce(3)
    references = [r for row in lane.cursor.unfinished for r in row]
    read: list[tuple[int, int]] = []
    original = Feed.read

    def counted(feed: Feed, ordinal: int, number: int) -> Any:
        read.append((ordinal, number))
        return original(feed, ordinal, number)

    monkeypatch.setattr(Feed, "read", counted)
    pipeline.lane(lane.cursor).produce(1)
    assert len(read) == len({r[:3] for r in references}) < len(references)


def test_a_phase_without_data_begins_the_next_one_and_the_last_is_an_error(
    table: dict[str, Any], tokenizer: Path
) -> None:
    a, b = table["datasets"]
    table = {**table, "datasets": [{**a, "passes": 1}, b]}
    only_a = {"from_tokens": 0, "weights": {"a": 1}}
    later = {"from_tokens": 1_000_000, "weights": {"b": 1}}
    pipeline = make_pipeline({**table, "phases": [only_a, later]}, seq_len=24, tokenizer=tokenizer)
    lane = pipeline.lane(pipeline.start(0))
    lane.produce(60)
    assert lane.cursor.phase == 1
    assert_same_stream(pipeline, batch=12, runs=[Run(2, 12), Run(3, 12)])
    pipeline = make_pipeline({**table, "phases": [only_a]}, seq_len=24, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="phase 0 have had their passes, while others are endless"):
        pipeline.lane(pipeline.start(0)).produce(60)


TOKEN_FILES = [("a.jsonl", False), ("a.parquet", False), ("a.arrow", False), ("a.arrow", True)]


def token_table(path: Path, texts: list[str], stream: bool = False) -> dict[str, Any]:
    """A dataset of the ids that the tokenizer makes of ``texts``."""
    write_tokens(path, [byte_ids(text) for text in texts], stream)
    dataset = {"name": "ids", "path": str(path), "tokens_field": "input_ids"}
    return {"lanes": 4, "datasets": [dataset], "shuffle": {"buffer_size": 12}}


@pytest.mark.parametrize(("file", "stream"), TOKEN_FILES)
def test_token_ids_made_beforehand_give_the_rows_of_their_texts_and_the_laws_hold(
    file: str, stream: bool, tmp_path: Path, tokenizer: Path
) -> None:
    texts = [f"text {n} " * (n % 9 + 1) for n in range(150)]
    ids = token_table(tmp_path / file, texts, stream)
    pipeline = make_pipeline(ids, seq_len=24, tokenizer=tokenizer)
    assert_same_stream(pipeline, batch=12, runs=PLAN)
    in_order = {"lanes": 1, "passes": 1, "shuffle": {"buffer_size": 0, "order": "sequential"}}
    write_jsonl(tmp_path / "texts.jsonl", texts)
    of_texts = {**in_order, "datasets": [{"name": "ids", "path": str(tmp_path / "texts.jsonl")}]}
    want = whole_run(make_pipeline(of_texts, seq_len=24, tokenizer=tokenizer))
    got = whole_run(make_pipeline({**ids, **in_order}, seq_len=24, tokenizer=tokenizer))
    assert len(got) > 100
    assert np.array_equal(got, want)


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet", "a.arrow"])
def test_an_id_that_the_tokenizer_lacks_is_an_error_with_its_file(
    file: str, tmp_path: Path, tokenizer: Path
) -> None:
    table = token_table(tmp_path / file, ["a", "b"])
    write_tokens(tmp_path / file, [[1, 2, 3], [4, 258, 5]])
    pipeline = make_pipeline(table, seq_len=8, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=4, run=Run(1, 1))
    with pytest.raises(ValueError, match=rf"{file}: a document holds the token id 258; .*0 to 257"):
        next(stream)
    stream.close()


def test_functions_see_records_of_token_ids(tmp_path: Path, tokenizer: Path) -> None:
    table = token_table(tmp_path / "a.arrow", [f"{n:03d}" for n in range(40)])
    table |= {"passes": 1, "operators": operators(("filter", "has_even_last_digit"))}
    table["packing"] = {"algorithm": "none"}
    pipeline = make_pipeline(table, seq_len=8, tokenizer=tokenizer)
    kept = documents_of(whole_run(pipeline), pipeline)
    assert sorted(kept) == [f"{n:03d}" for n in range(0, 40, 2)]


def test_ids_that_a_function_makes_of_no_list_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    table = token_table(tmp_path / "a.jsonl", ["abc"])
    table["operators"] = operators(("map", "ids_to_text"))
    pipeline = make_pipeline(table, seq_len=8, tokenizer=tokenizer)
    (stream,) = batch_streams(pipeline, batch=4, run=Run(1, 1))
    with pytest.raises(ValueError, match="has abc under 'input_ids' where a list of token ids"):
        next(stream)
    stream.close()
