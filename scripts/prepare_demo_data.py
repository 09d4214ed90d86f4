"""Writes the demo's data: two small datasets that come with every Python, and a tokenizer.

Usage: python scripts/prepare_demo_data.py [FOLDER]     (default: outputs/demo)

FOLDER/data/prose holds the Python language reference, one topic a document, as JSONL;
FOLDER/data/code the sources of the standard library, one file a document, as Parquet;
FOLDER/tokenizer a byte-level BPE tokenizer trained on both. Nothing is downloaded.
"""

import json
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
CODE_BYTES = 8_000_000
CODE_PACKAGES = ["asyncio", "collections", "email", "http", "importlib", "json", "logging"]
CODE_PACKAGES += ["multiprocessing", "unittest", "urllib", "xml"]
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def prose_documents() -> list[str]:
    """Return the language reference, one topic a document."""
    return [topics[name] for name in sorted(topics)]


def code_documents() -> list[str]:
    """Return standard-library sources, one file a document, up to CODE_BYTES in all."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(stdlib.glob("*.py"))
    for package in CODE_PACKAGES:
        files += sorted((stdlib / package).rglob("*.py"))
    documents, size = [], 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if not text.strip():
            continue
        size += len(text.encode())
        if size > CODE_BYTES:
            break
        documents.append(text)
    return documents


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a GPT-2-like byte-level BPE and write it as TorchTitan's tokenizer reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_jsonl(texts: list[str], path: Path) -> None:
    """Write one {"text": ...} object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def write_parquet(texts: list[str], path: Path) -> None:
    """Write one column, text, in row groups of 64 documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path, row_group_size=64)


def main(folder: Path) -> None:
    prose, code = prose_documents(), code_documents()
    write_jsonl(prose, folder / "data/prose/language_reference.jsonl")
    write_parquet(code, folder / "data/code/standard_library.parquet")
    train_tokenizer(prose + code, VOCAB_SIZE, folder / "tokenizer")
    for name, texts in ("prose", prose), ("code", code):
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        print(f"{name}: {len(texts)} documents, {megabytes:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/demo"))
