"""Past batches made again: the bytes that were logged, traced to the records they came from."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.audit.trained import BATCH, SEQ_LEN, train, write_data
from tests.helpers import Run, batch_streams, make_pipeline, take_step
from tests.toys import byte_ids, byte_tokenizer, write_jsonl, write_tokens
from torchtitan_zephon.audit.log import AuditError
from torchtitan_zephon.audit.replay import Replay, recipe_from_settings
from torchtitan_zephon.audit.runs import read_run
from torchtitan_zephon.recipe import RecipeError, parse_recipe


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    return write_data(tmp_path)


def replay(folder: Path, **options: Any) -> Replay:
    return Replay(read_run(str(folder)), **options)


def text_of(shard: str, record: int) -> str:
    """The text at a line, from 1, or a row, from 0, read here independently of the package."""
    if shard.endswith(".parquet"):
        return pq.read_table(shard)["text"][record].as_py()
    return json.loads(Path(shard).read_bytes().split(b"\n")[record - 1])["text"]


def test_a_recipe_survives_the_way_through_the_log() -> None:
    recipe = parse_recipe(
        {
            "lanes": 4,
            "datasets": [{"name": "x", "path": "/x", "weight": 0.25}, {"name": "y", "path": "/y"}],
            "packing": {"algorithm": "first_fit", "open_bins": 5},
            "shuffle": {"buffer_size": 7, "order": "sequential"},
            "validation": {"datasets": [{"name": "v", "path": "/v"}]},
        },
        seq_len=9,
        tokenizer_path="/t",
    )
    recipe = dataclasses.replace(recipe, passes=3)
    assert recipe_from_settings(json.loads(json.dumps(dataclasses.asdict(recipe)))) == recipe


def test_settings_of_another_release_are_refused_by_name() -> None:
    with pytest.raises(RecipeError, match=r"recipe\.glue: no such setting"):
        recipe_from_settings({"datasets": [], "seq_len": 3, "glue": 1})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"packing": {"algorithm": "first_fit", "open_bins": 3}},
        {"packing": {"algorithm": "best_fit_wrap", "open_bins": 3}},
        {"shuffle": {"buffer_size": 0, "order": "sequential"}},
        {"lanes": 5},
        {"operators": [{"kind": "filter", "function": "tests.user_functions:is_short"}]},
    ],
    ids=["wrap", "first_fit", "best_fit_wrap", "sequential", "5 lanes", "filter"],
)
def test_every_step_of_a_run_with_restarts_is_made_again_and_every_piece_is_in_its_record(
    more: dict[str, Any], table: dict[str, Any], tmp_path: Path
) -> None:
    table |= more
    train(tmp_path / "run", table, [Run(2, 4), Run(3, 3), Run(1, 2)])
    again = replay(tmp_path / "run")
    pipeline = make_pipeline(table, seq_len=SEQ_LEN, tokenizer=tmp_path / "tokenizer")
    streams = batch_streams(pipeline, batch=BATCH, run=Run(1, 9))
    seen = set()
    for step in range(1, 10):
        rebuilt = again.checked_step(step)
        rows = take_step(streams, batch=BATCH, micro_batch=1)
        for row, sequence in zip(rows, rebuilt.sequences, strict=True):
            assert np.array_equal(row[0], sequence.inputs)
            assert np.array_equal(row[1], sequence.labels)
            pieces = again.pieces(step, sequence)
            assert sum(p.length for p in pieces) == int((sequence.labels >= 0).sum())
            for piece in pieces:
                origin = again.origin(step, sequence, piece)
                assert origin.record is not None
                document = byte_ids(text_of(origin.shard, origin.record))
                assert origin.tokens == len(document)
                start, stop = piece.reference.start, piece.reference.stop
                inputs = sequence.inputs[piece.column : piece.column + piece.length]
                assert inputs.tolist() == document[start:stop]
                assert origin.dataset == piece.dataset
                seen.add(Path(origin.shard).name)
    streams[0].close()
    assert seen >= {"0.jsonl", "b.parquet"}


def test_records_that_are_equal_are_told_apart_and_blank_lines_counted(tmp_path: Path) -> None:
    table = write_data(tmp_path)
    path = tmp_path / "c.jsonl"
    records = ["same", "", "other", "same", "a", "same"]
    path.write_bytes(b"".join(b'{"text": "%s"}\r\n\n' % r.encode() for r in records))
    table |= {"datasets": [{"name": "c", "path": str(path)}], "lanes": 1}
    table |= {"shuffle": {"buffer_size": 0, "order": "sequential"}}
    train(tmp_path / "run", table, [Run(1, 1)])
    again = replay(tmp_path / "run")
    origins = [
        again.origin(1, sequence, piece)
        for sequence in again.checked_step(1).sequences
        for piece in again.pieces(1, sequence)
        if piece.reference.start == 0
    ]
    assert [(o.record, o.byte, o.epoch) for o in origins[:8]] == [
        (1, 0, 0),
        (3, 19, 0),
        (5, 34, 0),
        (7, 54, 0),
        (9, 73, 0),
        (11, 89, 0),
        (1, 0, 1),
        (3, 19, 1),
    ]
    assert str(origins[2]) == f"{path}, line 5"


def test_a_piece_of_what_operators_made_is_traced_to_the_record_that_they_made_it_of(
    tmp_path: Path,
) -> None:
    table = write_data(tmp_path)
    texts = [f"a{n}. {'b' * n}. {'c' * n}{n}." for n in range(60)]
    table |= {
        "datasets": [{"name": "d", "path": str(write_jsonl(tmp_path / "d.jsonl", texts))}],
        "operators": [
            {"kind": "flat_map", "function": "tests.user_functions:sentences"},
            {"kind": "filter", "function": "tests.user_functions:is_short"},
            {"kind": "map", "function": "tests.user_functions:shout"},
        ],
    }
    train(tmp_path / "run", table, [Run(2, 3)])
    again = replay(tmp_path / "run")
    seen = 0
    for step in (1, 2, 3):
        for sequence in again.checked_step(step).sequences:
            for piece in again.pieces(step, sequence):
                origin = again.origin(step, sequence, piece)
                assert origin.record is not None
                made = [byte_ids(part.upper()) for part in texts[origin.record - 1].split(".")]
                ids = sequence.inputs[piece.column : piece.column + piece.length].tolist()
                start, stop = piece.reference.start, piece.reference.stop
                assert any(ids == one[start:stop] and origin.tokens == len(one) for one in made)
                seen += 1
    assert seen > 36


def test_a_conversation_is_traced_to_its_record(tmp_path: Path) -> None:
    table = write_data(tmp_path)
    folder = tmp_path / "tokenizer"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"what is {n}?"},
                {"role": "assistant", "content": f"it is {n}"},
            ]
        }
        for n in range(40)
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(c) + "\n" for c in chats), "utf-8")
    datasets = [{"name": "c", "path": str(path)}]
    table |= {"datasets": datasets, "chat": {}, "packing": {"algorithm": "first_fit"}}
    train(tmp_path / "run", {**table, "lanes": 2}, [Run(1, 1)])
    again = replay(tmp_path / "run")
    found = 0
    for sequence in again.checked_step(1).sequences:
        for piece in again.pieces(1, sequence):
            if piece.reference.start == 0:
                number = int(piece.text.split("what is ")[1].split("?")[0])
                assert str(again.origin(1, sequence, piece)) == f"{path}, line {number + 1}"
                found += 1
    assert found > 6


def test_a_step_late_in_a_run_takes_one_segment_of_each_lane_not_all_before_it(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_zephon.lane import Lane

    train(tmp_path / "run", table, [Run(2, 40)])
    made = []
    produce = Lane.produce
    monkeypatch.setattr(
        Lane, "produce", lambda self, rows: made.append(self.cursor.segment) or produce(self, rows)
    )
    assert replay(tmp_path / "run").checked_step(40).matches
    assert made == [4] * 6  # 2 sequences of each lane a step, 16 in a segment


def test_the_first_step_of_a_run_that_resumed_elsewhere_has_cursors_too(
    table: dict[str, Any], tmp_path: Path
) -> None:
    state = train(tmp_path / "first", table, [Run(2, 5)])
    train(tmp_path / "second", table, [Run(3, 3)], state=state)
    again = replay(tmp_path / "second")
    assert list(again.run.steps) == [6, 7, 8]
    assert all(again.checked_step(step).matches for step in (6, 7, 8))


def test_text_is_found_with_step_sequence_and_place(table: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a" / "2.jsonl", ["x" * 20, "find the needle here", "y" * 9])
    table |= {"shuffle": {"buffer_size": 0}, "packing": {"algorithm": "first_fit"}}
    train(tmp_path / "run", table, [Run(2, 40)])
    again = replay(tmp_path / "run")
    hits = list(again.search(range(1, 41), "needle"))
    assert 1 <= len(hits) <= 4
    for rebuilt, index, piece in hits:
        assert rebuilt.logged.sha256 == rebuilt.sha256
        origin = again.origin(rebuilt.logged.step, rebuilt.sequences[index], piece)
        assert str(origin) == f"{tmp_path / 'a' / '2.jsonl'}, line 2"
        assert piece.text == "<|bos|>find the needle here"
    assert list(again.search(range(1, 41), "no such text")) == []


def test_data_and_tokenizer_that_were_moved_are_found_where_they_are_said_to_be(
    table: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path / "run", table, [Run(1, 2)])
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "tokenizer").rename(tmp_path / "t")
    with pytest.raises(AuditError, match=r"the recipe cannot be used here: zephon\.datasets\[a\]"):
        replay(tmp_path / "run").step(1)
    moved = {"data": {"a": str(tmp_path / "moved")}, "tokenizer": str(tmp_path / "t")}
    again = replay(tmp_path / "run", **moved)
    assert again.checked_step(2).matches
    assert again.changes(2) == []
    with pytest.raises(AuditError, match="--data z: the recipe has no such dataset"):
        replay(tmp_path / "run", data={"z": "/"}).step(1)


def test_a_shard_edited_after_the_run_is_named_and_no_wrong_text_is_shown(
    table: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path / "run", table, [Run(1, 8)])
    shard = tmp_path / "a" / "0.jsonl"
    shard.write_text(shard.read_text().replace("line", "lime"))
    again = replay(tmp_path / "run")
    assert [c.partition(":")[0] for c in again.changes(3)] == ["datasets.a.content"]
    with pytest.raises(AuditError, match=r"step 3, made again, has SHA-256 .* cannot be shown; ch"):
        again.checked_step(3)
    shard.write_text("".join(shard.read_text().splitlines(keepends=True)[:20]))
    with pytest.raises(AuditError, match=r"changed since the run: datasets\.a\.bytes: \d+ -> \d+"):
        replay(tmp_path / "run").checked_step(3)


def test_a_step_that_an_edit_does_not_touch_is_shown_with_the_change_told(
    table: dict[str, Any], tmp_path: Path
) -> None:
    table |= {"shuffle": {"buffer_size": 0, "order": "sequential"}}
    train(tmp_path / "run", table, [Run(1, 2)])
    path = tmp_path / "b.parquet"
    path.write_bytes(path.read_bytes()[:-4] + b"PAR1")
    shard = tmp_path / "a" / "1.jsonl"
    lines = shard.read_text().splitlines(keepends=True)
    shard.write_text("".join([*lines[:-1], lines[-1].replace("more", "mere")]))
    again = replay(tmp_path / "run")
    assert again.checked_step(1).matches
    assert [c.partition(":")[0] for c in again.changes(1)] == ["datasets.a.content"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda audit: (audit / "cursors.jsonl").unlink(), "no cursor of lane 0"),
        (lambda audit: next(audit.glob("recipe-*")).unlink(), r"recipe-.*\.json is not there"),
        (lambda audit: next(audit.glob("recipe-*")).write_text("{}"), "has no 'settings'"),
        (lambda audit: next(audit.glob("recipe-*")).write_text("{"), "not JSON"),
        (lambda audit: (audit / "cursors.jsonl").write_text("{}\n"), "not a cursor"),
    ],
)
def test_what_is_missing_beside_the_log_is_named(
    damage: Any, message: str, table: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path / "run", table, [Run(1, 2)])
    damage(tmp_path / "run" / "audit")
    with pytest.raises(AuditError, match=message):
        replay(tmp_path / "run").step(1)


def test_a_step_that_is_not_logged_is_an_error_with_those_that_are(
    table: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path / "run", table, [Run(1, 2)])
    with pytest.raises(AuditError, match="step 3 is not logged; the log has steps 1 to 2"):
        replay(tmp_path / "run").step(3)


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet", "a.arrow"])
def test_documents_of_token_ids_are_traced_to_their_records(file: str, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer")
    documents = [byte_ids(f"document {n}") for n in range(60)]
    write_tokens(tmp_path / file, documents)
    dataset = {"name": "ids", "path": str(tmp_path / file), "tokens_field": "input_ids"}
    table = {
        "lanes": 2,
        "datasets": [dataset],
        "tokenizer": {"path": str(tmp_path / "tokenizer")},
        "shuffle": {"buffer_size": 4},
    }
    train(tmp_path / "run", table, [Run(2, 3)])
    again = replay(tmp_path / "run")
    for step in range(1, 4):
        rebuilt = again.checked_step(step)
        for sequence in rebuilt.sequences:
            for piece in again.pieces(step, sequence):
                record = again.origin(step, sequence, piece).record
                assert record is not None
                ids = documents[record - (file == "a.jsonl")]
                start, stop = piece.reference.start, piece.reference.stop
                here = slice(piece.column, piece.column + piece.length)
                assert sequence.inputs[here].tolist() == ids[start:stop]
