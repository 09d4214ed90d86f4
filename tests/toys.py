"""Small tokenizers and files that tests are made of."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID, FIRST_BYTE_ID = 0, 1, 2


def byte_tokenizer(folder: Path, *, bos: bool = True, eos: bool = True) -> Path:
    """Writes a Hugging Face tokenizer in which each byte is one token; returns ``folder``.

    BOS is id 0, EOS 1, byte ``b`` is ``2 + b``; a special token that is not asked for keeps its id
    free.
    """
    vocab = {BOS: BOS_ID, EOS: EOS_ID}
    vocab |= {symbol: FIRST_BYTE_ID + byte for byte, symbol in byte_symbols().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {"bos_token": BOS} if bos else {}
    named |= {"eos_token": EOS} if eos else {}
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in named.values()])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    return folder


def byte_symbols() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (as in GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def byte_ids(text: str, *, bos: bool = True, eos: bool = True) -> list[int]:
    """What ``byte_tokenizer`` makes of a document."""
    middle = [FIRST_BYTE_ID + b for b in text.encode("utf-8")]
    return [BOS_ID] * bos + middle + [EOS_ID] * eos


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """Writes a JSON Lines shard with the texts under ``text``; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    return path


def write_tokens(path: Path, documents: Sequence[Sequence[int]], stream: bool = False) -> Path:
    """Writes token ids under ``input_ids`` in the format of the ending: one document a row.

    Arrow in record batches of seven rows, as a file or a ``stream``; Parquet in groups of eleven.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"input_ids": list(d)}) + "\n" for d in documents))
        return path
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=11)
    else:
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=7):
                writer.write_batch(batch)
    return path


def write_parquet(path: Path, texts: Sequence[str | None], row_group_size: int = 1000) -> Path:
    """Writes a Parquet shard with the texts in column ``text``; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path
