"""Each file of ``train_configs/`` loads, and is built as far as a machine without GPUs allows."""

from pathlib import Path

import pytest
import torch
from torchtitan.trainer import Trainer

from tests.toys import byte_tokenizer, write_jsonl, write_parquet
from torchtitan_zephon.recipe import RecipeError
from torchtitan_zephon.titan.config import load_config
from torchtitan_zephon.titan.loader import ZephonDataLoader

CONFIGS = Path(__file__).parents[2] / "train_configs"


def load(name: str, tmp_path: Path) -> Trainer.Config:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    folders = ["--hf_assets_path", str(tokenizer), "--dump_folder", str(tmp_path / "out")]
    return load_config(["--config_file", str(CONFIGS / name), *folders])


@pytest.mark.parametrize(
    ("name", "ranks", "shares"),
    [
        ("debug_cpu.toml", (1, 2, 3, 4, 6, 12), {"prose": 0.7, "code": 0.3}),
        ("llama3_8b_fineweb.toml", (8, 64, 512), {"fineweb-edu": 0.8, "code": 0.15, "math": 0.05}),
        ("elastic_1b.toml", (8, 16, 32, 64), {"web": 0.7, "code": 0.3}),
    ],
)
def test_a_config_gives_a_model_and_a_loader_at_each_rank_count_that_it_is_for(
    name: str,
    ranks: tuple[int, ...],
    shares: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where the demo has left no data
    config = load(name, tmp_path)
    assert config.model_spec is not None
    with torch.device("meta"):
        model = config.model_spec.model.build()
    assert sum(p.numel() for p in model.parameters()) > 1_000_000
    loader = config.dataloader
    assert isinstance(loader, ZephonDataLoader.Config)
    assert loader.recipe is not None
    assert {d.name: d.weight for d in loader.recipe.datasets} == shares
    # The data is not here: that, and nothing else, is what each loader has to object to.
    training = config.training
    for count in ranks:
        with pytest.raises(RecipeError) as error:
            loader.build(
                dp_world_size=count,
                dp_rank=0,
                tokenizer=None,
                seq_len=training.seq_len,
                local_batch_size=min(
                    training.local_batch_size, training.global_batch_size // count
                ),
            )
        assert {f.split(":")[0] for f in error.value.faults} >= {
            f"zephon.datasets[{n}]" for n in shares
        }
        assert all("no such file" in f or "no file matches" in f for f in error.value.faults)


def test_the_debug_config_trains_on_data_of_its_kinds(tmp_path: Path) -> None:
    prose = write_jsonl(tmp_path / "prose" / "a.jsonl", ["some prose " * 9] * 50)
    code = write_parquet(tmp_path / "code" / "a.parquet", ["def f(): pass\n" * 9] * 50)
    config = load_config(
        [
            *("--config_file", str(CONFIGS / "debug_cpu.toml")),
            *("--hf_assets_path", str(byte_tokenizer(tmp_path / "tokenizer"))),
            *("--dump_folder", str(tmp_path / "out")),
            *("--zephon.datasets.prose.path", str(prose.parent)),
            *("--zephon.datasets.code.path", str(code.parent)),
        ]
    )
    loader = config.dataloader.build(
        dp_world_size=3, dp_rank=2, tokenizer=None, seq_len=256, local_batch_size=2
    )
    batch, labels = next(loader)
    loader.close()
    assert batch["input"].shape == labels.shape == (2, 256)
