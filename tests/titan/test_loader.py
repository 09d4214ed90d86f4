"""The loader as TorchTitan builds it: batches, parity with the stock loader, checks at start."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toys import BOS, EOS, byte_tokenizer, write_jsonl
from torchtitan_zephon.audit.log import AuditError, AuditLog, read_lines
from torchtitan_zephon.recipe import RecipeError, parse_recipe
from torchtitan_zephon.titan.loader import ZephonDataLoader


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def build(
    table: dict[str, Any],
    tmp_path: Path,
    tokenizer: Path,
    *,
    batch: int = 8,
    local: int = 4,
    seq_len: int = 32,
    ranks: int = 1,
    rank: int = 0,
    snapshot: int | None = None,
    **config: Any,
) -> ZephonDataLoader:
    recipe = parse_recipe(table, seq_len=seq_len, tokenizer_path=str(tokenizer))
    settings = ZephonDataLoader.Config(
        recipe=recipe, global_batch_size=batch, dump_folder=str(tmp_path / "out"), **config
    )
    return settings.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        seq_len=seq_len,
        local_batch_size=local,
        snapshot_every_n_steps=snapshot,
    )


def one_dataset(tmp_path: Path, **more: Any) -> dict[str, Any]:
    path = write_jsonl(tmp_path / "d.jsonl", ["some text " * (n % 9) for n in range(90)])
    return {"datasets": [{"name": "d", "path": str(path)}], **more}


def test_a_batch_is_what_the_trainer_takes_int64_inputs_positions_and_labels(
    tmp_path: Path, tokenizer: Path
) -> None:
    loader = build(one_dataset(tmp_path), tmp_path, tokenizer)
    batch, labels = next(iter(loader))
    loader.close()
    assert sorted(batch) == ["input", "positions"]
    for tensor in (batch["input"], batch["positions"], labels):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (4, 32)
        assert tensor.device.type == "cpu"


@pytest.mark.parametrize("seq_len", [16, 128, 1000])
def test_one_lane_unshuffled_and_wrapped_equals_torchtitans_own_loader_over_a_whole_file(
    seq_len: int, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = ["", "a", "ünïcode ✓ " * 7, f"the text of {BOS} and {EOS} here", "x" * 3000]
    texts += [f"document {n} " * (n % 40) for n in range(300)]
    write_jsonl(tmp_path / "data" / "d.jsonl", texts)
    stock = HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path=str(tmp_path / "data"), infinite=False
    ).build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(tokenizer)),
        seq_len=seq_len,
        local_batch_size=1,
    )
    table = {
        "lanes": 1,
        "datasets": [{"name": "d", "path": str(tmp_path / "data")}],
        "tokenizer": {"special_tokens": "parse"},  # as the stock loader does
        "shuffle": {"buffer_size": 0, "order": "sequential"},
    }
    ours = build(table, tmp_path, tokenizer, batch=1, local=1, seq_len=seq_len)
    count = 0
    for (want, want_labels), (got, got_labels) in zip(stock, ours, strict=False):
        assert torch.equal(got["input"], want["input"])
        assert torch.equal(got["positions"], want["positions"])
        assert torch.equal(got_labels, want_labels)
        count += 1
    ours.close()
    pairs = sum(len(t.replace(BOS, "b").replace(EOS, "e").encode()) + 1 for t in texts)
    assert count == pairs // seq_len


def test_data_tokenizer_and_validation_faults_are_reported_together_before_training(
    tmp_path: Path, tokenizer: Path
) -> None:
    table = {
        "datasets": [
            {"name": "a", "path": str(tmp_path / "nothing.jsonl")},
            {"name": "b", "path": str(tmp_path / "*.parquet")},
        ],
        "tokenizer": {"path": "no_such_tokenizer"},
        "validation": {"datasets": [{"name": "v", "path": str(tmp_path / "absent")}]},
    }
    with pytest.raises(RecipeError) as error:
        build(table, tmp_path, tokenizer)
    assert [f.split(":")[0] for f in error.value.faults] == [
        "zephon.datasets[a]",
        "zephon.datasets[b]",
        "zephon.tokenizer",
        "zephon.validation.datasets[v]",
    ]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(RecipeError, match="has 258 token ids, the model knows 256"):
        build(one_dataset(tmp_path), tmp_path, tokenizer, model_vocab_size=256)


def test_a_missing_global_batch_size_is_refused_and_the_message_says_why(
    tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(ValueError, match="so the data of every step would change with the ranks"):
        build(one_dataset(tmp_path), tmp_path, tokenizer, batch=-1)


def test_a_global_batch_that_does_not_divide_or_is_not_the_trainers_is_refused(
    tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(ValueError, match=r"global_batch_size \(8\) must be a multiple"):
        build(one_dataset(tmp_path), tmp_path, tokenizer, ranks=3)
    with pytest.raises(ValueError, match=r"global batch \(8\) is not TorchTitan's: 5 microbatches"):
        build(one_dataset(tmp_path), tmp_path, tokenizer, snapshot=5)


def test_lanes_are_the_largest_divisor_of_the_global_batch_up_to_64(
    tmp_path: Path, tokenizer: Path
) -> None:
    loader = build(one_dataset(tmp_path), tmp_path, tokenizer, batch=96, local=96)
    assert sorted(loader.state_dict()["lane"]) == [f"{n:05d}" for n in range(48)]
    loader.close()


def test_an_entry_of_64_lanes_in_the_state_stays_small(tmp_path: Path, tokenizer: Path) -> None:
    loader = build(one_dataset(tmp_path, lanes=64), tmp_path, tokenizer, batch=64, local=64)
    for _ in range(40):
        next(loader)
    state = loader.state_dict()
    loader.close()
    assert len(state["lane"]) == 64
    assert all(len(entry) < 1000 for entry in state["lane"].values())


def test_the_audit_log_has_a_line_a_step_and_a_rerun_with_other_data_is_an_error(
    tmp_path: Path, tokenizer: Path
) -> None:
    table = one_dataset(tmp_path)
    loader = build(table, tmp_path, tokenizer)
    for _ in range(8):
        next(loader)
    loader.close()
    path = tmp_path / "out" / "audit" / "global_batches.jsonl"
    lines = list(read_lines(path))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["sequences"] for line in lines] == [8, 16, 24, 32]
    assert all(line["tokens"] == {"d": 8 * 32} for line in lines)
    assert all(len(line) <= 400 for line in path.read_bytes().splitlines())

    again = build(table, tmp_path, tokenizer)
    for _ in range(8):
        next(again)
    again.close()  # the same data once more: fine

    text = path.read_text()
    path.write_text(text.replace(lines[2]["sha256"], "0" * 64))
    altered = build(table, tmp_path, tokenizer)
    for _ in range(6):
        next(altered)
    with pytest.raises(AuditError, match="step 3 was run again and got other data"):
        altered.close()


def test_stepping_to_the_next_batch_never_waits_for_the_audit(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, gate = AuditLog.append, threading.Event()

    def append_when_let(*args: Any) -> None:
        assert gate.wait(timeout=60)
        append(*args)

    monkeypatch.setattr(AuditLog, "append", append_when_let)
    loader = build(one_dataset(tmp_path), tmp_path, tokenizer)
    for _ in range(10):
        next(loader)
    path = tmp_path / "out" / "audit" / "global_batches.jsonl"
    assert list(read_lines(path)) == []
    gate.set()
    loader.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5]


def test_validation_is_one_pass_in_file_order_and_ends_on_all_ranks_together(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = write_jsonl(tmp_path / "v.jsonl", ["0123456"] * 5)
    table = one_dataset(tmp_path, validation={"datasets": [{"name": "v", "path": str(path)}]})
    for ranks, steps in ((1, 3), (2, 2), (3, 1)):
        loaders = [
            build(
                table,
                tmp_path,
                tokenizer,
                local=2,
                seq_len=8,
                ranks=ranks,
                rank=rank,
                validation=True,
                infinite=False,
            )
            for rank in range(ranks)
        ]
        batches = [list(loader) for loader in loaders]
        assert [len(b) for b in batches] == [steps] * ranks
        labels = torch.cat([labels for rank in batches for _, labels in rank])
        assert int((labels != -100).sum()) == 5 * 8
        for loader in loaders:
            loader.close()


def test_a_validation_loader_that_is_dropped_half_read_ends_its_threads_without_garbage_collection(
    tmp_path: Path, tokenizer: Path
) -> None:
    """TorchTitan's Validator closes no loader, and its Trainer turns the collector off."""
    path = write_jsonl(tmp_path / "v.jsonl", ["0123456"] * 500)
    data = {"datasets": [{"name": "v", "path": str(path)}]}
    table = {**data, "validation": data, "runtime": {"threads": 2}}
    gc.disable()
    try:
        loader = build(table, tmp_path, tokenizer, seq_len=8, validation=True)
        next(loader)
        threads = [t for t in threading.enumerate() if t.name.startswith("zephon")]
        assert len(threads) >= 2
        del loader
        for thread in threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        gc.enable()
