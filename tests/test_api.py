"""The Python face: the same object as a TOML's, under plain PyTorch and inside its DataLoaders."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.helpers import Run, digest, global_batches, make_pipeline, merge_states
from tests.toys import byte_ids, byte_tokenizer, write_jsonl, write_parquet, write_tokens
from tests.user_functions import Alternate, is_short, number_of_calls, shout
from torchtitan_zephon import (
    CustomWorkSource,
    Dataset,
    MixtureSpec,
    Pipeline,
    SequentialWorkSource,
    StaticMixtureWorkSource,
    TokenEstimation,
)
from torchtitan_zephon.recipe import RecipeError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def datasets(tmp_path: Path) -> list[Any]:
    a = write_jsonl(tmp_path / "a.jsonl", [f"a{n:03d} " * (n % 9 + 1) for n in range(70)])
    b = write_jsonl(tmp_path / "b.jsonl", [f"b{n:03d} " * (n % 5 + 1) for n in range(50)])
    return [Dataset.from_path("a", a), Dataset.from_path("b", b)]


def example(datasets: list[Any], tokenizer: Path) -> Pipeline:
    """The published example, but for its imports."""
    source = StaticMixtureWorkSource(
        datasets=datasets,
        mixture=MixtureSpec({"a": 0.7, "b": 0.3}),
        token_estimation=TokenEstimation(),
        seed=42,
    )
    return (
        Pipeline(source)
        .options(io_options={"cache": {"enabled": True}})
        .map(shout)
        .filter(is_short)
        .tokenize(tokenizer_id=str(tokenizer), field="text", parallelism=2)
        .pack_flat(max_length=32, algorithm="first_fit")
        .shuffle(buffer_size=24, seed=42)
        .batch(microbatch_size=2)
    )


def digests(pipeline: Pipeline, count: int) -> list[str]:
    out = []
    for _, batch in zip(range(count), pipeline, strict=False):
        rows = zip(batch.inputs, batch.labels, batch.positions, strict=True)
        out.append(digest([np.stack(row).astype("<i4") for row in rows]))
    return out


def test_the_published_example_yields_training_batches(
    datasets: list[Any], tokenizer: Path
) -> None:
    with example(datasets, tokenizer) as pipeline:
        for _, batch in zip(range(3), pipeline, strict=False):
            inputs, labels = batch.to_training()
            assert sorted(inputs) == ["input", "positions"]
            assert inputs["input"].dtype == labels.dtype == torch.int64
            assert inputs["input"].shape == labels.shape == (2, 32)
            assert bytes(i - 2 for i in batch.inputs[0] if i >= 2).isupper()


def test_python_and_toml_build_the_same_pipeline_both_ways(
    datasets: list[Any], tokenizer: Path, tmp_path: Path
) -> None:
    pipeline = example(datasets, tokenizer).batch(microbatch_size=2, global_batch_size=6)
    text = pipeline.to_toml()
    (tmp_path / "p.toml").write_text(text)
    again = Pipeline.from_toml(tmp_path / "p.toml")
    assert again.to_toml() == text
    assert again.open().fingerprint == pipeline.open().fingerprint
    assert again.open().recipe == pipeline.open().recipe
    with pipeline, again:
        assert digests(again, 9) == digests(pipeline, 9)
    table = {"datasets": [{"name": "a", "path": datasets[0].path}], "shuffle": {"buffer_size": 9}}
    opened = make_pipeline(table, seq_len=16, tokenizer=tokenizer, batch=4)
    assert Pipeline(opened.recipe).open().fingerprint == opened.fingerprint


def test_a_second_for_goes_on_and_a_state_resumes_at_another_rank_count(
    datasets: list[Any], tokenizer: Path
) -> None:
    pipeline = example(datasets, tokenizer).batch(microbatch_size=1, global_batch_size=12)

    def at(rank: int, ranks: int) -> Pipeline:
        return pipeline.options(dp_rank=rank, dp_world_size=ranks)

    with at(0, 1) as whole:
        expected = digests(whole, 5 * 12)
    with at(0, 1) as twice:
        assert digests(twice, 7) + digests(twice, 5) == expected[:12]
    shares = [at(rank, 3) for rank in range(3)]
    for share in shares:
        digests(share, 2 * 4)
    state = merge_states([share.state_dict() for share in shares])
    resumed = [at(rank, 2) for rank in range(2)]
    got = []
    for share in resumed:
        share.load_state_dict(state)
    for _ in range(3):
        for share in resumed:
            got += digests(share, 6)
    for one in [*shares, *resumed]:
        one.close()
    assert got == expected[2 * 12 :]


def test_automatic_lanes_are_those_of_the_state_that_is_loaded(
    datasets: list[Any], tokenizer: Path
) -> None:
    first = example(datasets, tokenizer).batch(microbatch_size=1, global_batch_size=12)
    state = first.state_dict()
    second = example(datasets, tokenizer).batch(microbatch_size=1, global_batch_size=10)
    second.load_state_dict(state)
    assert second.open().lanes == 12
    first.close()
    second.close()


def test_a_device_mesh_tells_rank_and_ranks(datasets: list[Any], tokenizer: Path) -> None:
    class Mesh:
        def get_local_rank(self) -> int:
            return 1

        def size(self) -> int:
            return 3

    pipeline = example(datasets, tokenizer).batch(microbatch_size=2, global_batch_size=12)
    with (
        pipeline.options(mesh=Mesh()) as of_mesh,
        pipeline.options(dp_rank=1, dp_world_size=3) as of_numbers,
    ):
        assert digests(of_mesh, 6) == digests(of_numbers, 6)


def test_without_packing_each_document_has_a_row(datasets: list[Any], tokenizer: Path) -> None:
    source = SequentialWorkSource(datasets=datasets, seed=1)
    pipeline = (
        Pipeline(source)
        .decode_text()
        .tokenize(tokenizer_id=str(tokenizer), field="text", padding=True, max_length=64)
        .batch(microbatch_size=2)
    )
    with pipeline:
        batch = next(iter(pipeline))
    assert batch.inputs.shape == (2, 64)
    assert ((batch.positions == 0).sum(axis=1) <= 2).all()  # a document, and the padding


def test_document_ids_and_cu_seqlens_are_there_where_asked_for(
    datasets: list[Any], tokenizer: Path
) -> None:
    pipeline = example(datasets, tokenizer).options(extra_fields=("document_ids", "cu_seqlens"))
    with pipeline:
        batch = next(iter(pipeline))
    fields, _ = batch.to_training()
    ids, cu_seqlens = fields["document_ids"], fields["cu_seqlens"]
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == 64
    lengths = torch.diff(cu_seqlens).tolist()
    want, row = [], 0
    for length in lengths:
        row = 0 if sum(map(len, want)) % 32 == 0 else row + 1
        want.append([row] * length)
    assert ids.flatten().tolist() == [i for part in want for i in part]


def test_a_custom_work_source_decides_what_is_drawn(datasets: list[Any], tokenizer: Path) -> None:
    source = CustomWorkSource(datasets=datasets, source=Alternate(), seed=3)
    pipeline = (
        Pipeline(source)
        .tokenize(tokenizer_id=str(tokenizer))
        .pack_flat(max_length=32)
        .batch(microbatch_size=4)
    )
    with pipeline:
        digests(pipeline, 300)
        counts = pipeline.statistics()
        state = pipeline.state_dict()
    drawn = [0, 0]
    import json

    for text in state["lane"].values():
        for i, at in enumerate(json.loads(text)["positions"].values()):
            drawn[i] += at[3]
    assert abs(drawn[0] - drawn[1]) <= 4 * 50
    assert counts["read"] == sum(drawn)


def test_statistics_are_an_identity_and_explain_prints_the_plan(
    datasets: list[Any], tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = example(datasets, tokenizer).pack_flat(
        max_length=16, algorithm="best_fit", long_documents="drop", open_bins=3
    )
    with pipeline:
        digests(pipeline, 200)
        counts = pipeline.statistics()
        plan = pipeline.explain()
    assert counts["read"] == counts["trained"] + counts["pending"] + counts["dropped"]
    assert counts["trained"] > 0
    assert counts["dropped"] > 0
    assert counts["filtered documents"] > 0
    assert capsys.readouterr().out == plan + "\n"
    steps = [line.split()[0] for line in plan.splitlines()]
    assert steps == [
        *("pipeline", "read", "read", "map", "filter"),
        *("tokenize", "mix", "pack", "shuffle", "batch"),
    ]
    assert "tests.user_functions:shout" in plan
    assert "best_fit into rows of 16, 3 open rows a lane" in plan


def test_a_function_that_is_not_deterministic_is_found_by_check(
    datasets: list[Any], tokenizer: Path
) -> None:
    pipeline = example(datasets, tokenizer)
    assert pipeline.check() == []
    (fault,) = pipeline.map(number_of_calls).check()
    assert fault.startswith("map tests.user_functions:number_of_calls: gives other records each")


def test_faults_of_a_chain_are_reported_together(datasets: list[Any], tokenizer: Path) -> None:
    with pytest.raises(RecipeError) as error:
        StaticMixtureWorkSource(datasets=datasets, mixture={"a": 1, "c": 1})
    assert error.value.faults == [
        "mixture: no weight for dataset 'b'",
        "mixture: no dataset is named 'c'",
    ]
    pipeline = example(datasets, tokenizer).options(threads=0).shuffle(buffer_size=-1)
    with pytest.raises(RecipeError) as error:
        pipeline.open()
    assert error.value.faults == [
        "zephon.shuffle.buffer_size = -1: must be 0 or more",
        "zephon.runtime.threads = 0: must be from 1 to 256",
    ]
    with pytest.raises(RecipeError, match=r"options\(thraeds=...\): no such setting"):
        pipeline.options(thraeds=2)


def flat(samples: list[Any]) -> list[str]:
    out = []
    for fields, labels in samples:
        rows = zip(fields["input"], labels, fields["positions"], strict=True)
        out.append(digest([torch.stack(row).numpy().astype("<i4") for row in rows]))
    return out


@pytest.mark.parametrize("workers", [0, 2])
def test_inside_a_data_loader_batches_come_in_the_order_of_the_stream(
    workers: int, datasets: list[Any], tokenizer: Path
) -> None:
    pipeline = example(datasets, tokenizer).batch(microbatch_size=2, global_batch_size=6)
    with pipeline:
        expected = digests(pipeline, 11)
    loader = DataLoader(pipeline.as_dataset(), batch_size=None, num_workers=workers)
    assert flat([sample for sample, _ in zip(loader, range(11), strict=False)]) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("consumed", [0, 1, 5, 6])
def test_a_stateful_data_loader_saves_exactly_what_was_consumed(
    consumed: int, workers: int, datasets: list[Any], tokenizer: Path
) -> None:
    # Three microbatches a step: 1 and 5 of them end inside one.
    pipeline = example(datasets, tokenizer).batch(microbatch_size=2, global_batch_size=6)
    with pipeline:
        expected = digests(pipeline, 13)

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(pipeline.as_dataset(), batch_size=None, num_workers=workers)

    first = loader()
    got = []
    batches = iter(first)
    for _ in range(consumed):
        got.append(next(batches))
    state = first.state_dict()
    del batches, first
    second = loader()
    second.load_state_dict(state)
    got += [sample for sample, _ in zip(second, range(13 - consumed), strict=False)]
    assert flat(got) == expected


def test_importing_the_package_neither_imports_torch_nor_opens_a_connection() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('a connection at import')\n"
        "socket.socket.connect = refuse\n"
        "import torchtitan_zephon\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'torchtitan' not in sys.modules, 'torchtitan'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr


def test_the_stream_is_that_of_the_recipe(datasets: list[Any], tokenizer: Path) -> None:
    pipeline = example(datasets, tokenizer).batch(microbatch_size=6, global_batch_size=6)
    with pipeline:
        got = digests(pipeline, 4)
    assert got == global_batches(pipeline.open(), batch=6, runs=[Run(3, 4)])


def test_a_chain_that_begins_with_a_toml_keeps_its_operators_and_its_packing(
    datasets: list[Any], tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text(example(datasets, tokenizer).to_toml())
    more = Pipeline.from_toml(tmp_path / "p.toml").map(shout).tokenize(str(tokenizer))
    opened = more.open()
    assert [f.kind for f in opened.functions] == ["map", "filter", "map"]
    assert opened.recipe.packing.algorithm == "first_fit"


def test_a_partial_has_a_name_without_an_address_and_its_arguments_in_the_fingerprint(
    datasets: list[Any], tokenizer: Path
) -> None:
    def longer(record: dict[str, Any], than: int) -> bool:
        return len(record["text"]) > than

    def fingerprint(than: int) -> str:
        step = functools.partial(longer, than=than)
        return example(datasets, tokenizer).filter(step).open().fingerprint

    assert fingerprint(3) == fingerprint(3)
    assert fingerprint(3) != fingerprint(4)
    with pytest.raises(RecipeError, match="longer <partial>: has no import path"):
        example(datasets, tokenizer).filter(functools.partial(longer, than=3)).to_toml()


def test_a_program_that_ends_without_closing_its_pipeline_ends_without_a_word(
    tmp_path: Path,
) -> None:
    """Readers that wait are torn down with the interpreter, when modules are gone already."""
    byte_tokenizer(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "a.jsonl", ["some text"] * 50)
    write_parquet(tmp_path / "b.parquet", ["some text"] * 50)
    write_tokens(tmp_path / "c.arrow", [byte_ids("some text")] * 50)
    program = """
from torchtitan_zephon import Dataset, Pipeline, StaticMixtureWorkSource

datasets = [Dataset.from_path("a", "a.jsonl"), Dataset.from_path("b", "b.parquet")]
datasets.append(Dataset.from_path("c", "c.arrow", tokens_field="input_ids"))
source = StaticMixtureWorkSource(datasets=datasets, mixture={"a": 1, "b": 1, "c": 1})
pipeline = Pipeline(source).tokenize("tokenizer").pack_flat(64).batch(2)
next(iter(pipeline))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
