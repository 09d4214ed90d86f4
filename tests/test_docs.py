"""The docs are true: their Python runs, in order, and prints what they say; their TOML is read.

A block whose first line is a comment with a file's name, such as ``# my_steps.py``, is that file:
later blocks may read or import it.
"""

import contextlib
import importlib
import io
import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.packing import PAD, Corpus, assert_equal_rows, pairs_of
from tests.toys import byte_tokenizer, write_jsonl
from torchtitan_zephon.recipe import parse_recipe
from torchtitan_zephon.titan.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class CodeBlock:
    """What stands between two fences."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that the block is, or nothing."""
        found = re.match(r"# ([\w.-]+\.(?:py|toml))\n", self.text)
        return found[1] if found else ""


def blocks(page: Path) -> list[CodeBlock]:
    text = page.read_text("utf-8")
    return [
        CodeBlock(page, text[: found.start(2)].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def toml_blocks() -> list[CodeBlock]:
    return [b for page in PAGES for b in blocks(page) if b.language == "toml"]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the data and the tokenizer that the docs speak of, to work in."""
    byte_tokenizer(tmp_path / "assets" / "tokenizer")
    for shard in range(2):
        articles = [
            "We value your cookies.\n"
            + "\n\n".join(
                f"Paragraph {part} of article {n} says a thing or two." * (1 + n % 4)
                for part in range(1 + n % 3)
            )
            for n in range(60 * shard, 60 * shard + 60)
        ]
        write_jsonl(tmp_path / "data" / "web" / f"{shard}.jsonl", articles)
    programs = [f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 7) for n in range(80)]
    write_jsonl(tmp_path / "data" / "code" / "python.jsonl", programs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # What torchrun sets for one process.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in {**settings, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    if dist.is_initialized():
        dist.destroy_process_group()


def run_page(page: Path) -> dict[str, Any]:
    """Run a page's blocks in order; what they define."""
    module = types.ModuleType(f"page_{page.stem}")
    printed = ""
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text, "utf-8")
            importlib.invalidate_caches()
        if block.language == "text" and printed:
            assert masked(block.text) == masked(printed), block.where
        printed = ""
        if block.language == "python" and block.file:
            importlib.import_module(block.file.removesuffix(".py"))
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, module.__dict__)
            printed = out.getvalue()
    return module.__dict__


def masked(text: str) -> str:
    """Output without its hashes."""
    return re.sub(r"\b[0-9a-f]{12}\b", "HASH", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_says(page: Path, prepared: Path) -> None:
    run_page(page)


@pytest.mark.parametrize("block", toml_blocks(), ids=lambda block: block.where)
def test_toml_blocks_are_read_without_a_fault(block: CodeBlock, prepared: Path) -> None:
    tables = tomli.loads(block.text)
    if "model" in tables:
        folders = ["--hf_assets_path", "assets/tokenizer", "--dump_folder", "out"]
        Path("config.toml").write_text(block.text)
        config = load_config(["--config_file", "config.toml", *folders])
        assert config.training.seq_len == tables["training"]["seq_len"]
        return
    zephon = tables["zephon"]
    zephon.setdefault("datasets", [{"name": "web", "path": "data/web"}])
    recipe = parse_recipe(zephon, seq_len=tables.get("training", {}).get("seq_len", 128))
    assert list(recipe.all_faults()) == []


def test_every_link_of_a_page_leads_somewhere() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", other.read_text("utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
                assert anchor in anchors, f"{page.name}: {target}"


@pytest.mark.slow
def test_the_training_script_goes_on_at_another_number_of_ranks(prepared: Path) -> None:
    run_page(ROOT / "docs" / "pipeline.md")  # writes train.py and run.toml, and saves step 3
    script = Path("train.py")
    script.write_text(script.read_text() + "print('consumed', pipeline._stream.consumed)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for ranks, consumed in [(2, 6 * 16), (1, 9 * 16)]:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            + ["--nproc-per-node", str(ranks), "train.py"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"consumed {consumed}") == ranks


CORPORA = st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=17), max_size=25)


@pytest.fixture
def windows(prepared: Path) -> Any:
    """The module of the packer that the page on operators shows."""
    (block,) = [b for b in blocks(ROOT / "docs" / "operators.md") if b.file == "windows.py"]
    Path(block.file).write_text(block.text, "utf-8")
    importlib.invalidate_caches()
    return importlib.import_module("windows")


def test_the_packer_of_the_page_keeps_the_laws(windows: Any) -> None:
    @settings(deadline=None, max_examples=100)
    @given(CORPORA, st.integers(1, 7), st.integers(1, 5), st.integers(1, 6))
    def check(tokens: list[list[int]], seq_len: int, rows: int, window: int) -> None:
        corpus, packer = Corpus(tokens, window), windows.Windows(seq_len)
        made = []
        while not made or len(made[-1]) == rows:
            restored = windows.Windows(seq_len)
            restored.restore(corpus.read(packer.flush()))
            # Other windows: how documents were divided over calls of push must not matter.
            fresh = Corpus(tokens, window + 1, corpus.at).segment(restored, rows)
            made.append(corpus.segment(packer, rows))
            assert_equal_rows(fresh, made[-1])
            assert fresh.dropped == made[-1].dropped
            assert restored.flush() == packer.flush()
            assert PAD not in made[-1].sequences[0]
        sizes = [len(document) - 1 for document in tokens]
        whole = [(d, p) for d, size in enumerate(sizes) for p in range(size - size % seq_len)]
        assert pairs_of(made) == whole
        assert sum(segment.dropped for segment in made) == sum(sizes) - len(whole)

    check()
