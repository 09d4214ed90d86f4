"""The corpora and tokenizers that are measured on: made once, from fixed seeds, under one folder.

Nothing is downloaded. `words` are pseudo-words with Zipf frequencies in documents of lognormal
length; `python` are the sources of the installed Python packages, one file a document.
"""

import itertools
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from prepare_demo_data import BOS, EOS, train_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 32_768
BLOCK_MB = 256  # larger corpora repeat one block: it is the bytes that count, not the words


def make_words(rng: np.random.Generator, count: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and byte counts of distinct pseudo-words, short words first.

    200,000 words with Zipf frequencies give about as many distinct words in 64 MB as English has.
    """
    onsets = [
        *"bcdfghjklmnprstvwyz",
        "th",
        "st",
        "pr",
        "ch",
        "sh",
        "tr",
        "pl",
        *[""] * 4,
    ]
    vowels = [*"aeiouaeioe", "ea", "ou", "ai", "ee"]
    codas = [*"nstrldm", "ng", "nt", "st", "ck", *[""] * 12]
    syllables = np.array(["".join(parts) for parts in itertools.product(onsets, vowels, codas)])
    # Frequent words are short in every language: the number of syllables grows with rank.
    rank = np.arange(4 * count)
    lengths = 1 + (rng.random(len(rank)) * np.clip(np.log10(rank + 1), 0.5, 3.8)).astype(int)
    picks = syllables[rng.integers(len(syllables), size=(len(rank), 4))]
    words = ("".join(row[:n]) for row, n in zip(picks.tolist(), lengths.tolist(), strict=True))
    unique = list(itertools.islice(dict.fromkeys(words), count))
    sizes = np.array([len(word) for word in unique])
    return np.frombuffer("".join(unique).encode(), dtype=np.uint8), sizes


def make_documents(megabytes: int, seed: int = 0) -> Iterator[str]:
    """Yield documents of ASCII prose until they hold the given number of megabytes."""
    rng = np.random.default_rng(seed)
    words, sizes = make_words(rng)
    separators = [b" ", b", ", b". ", b".\n\n"]
    # One table of pieces: the words, then the separators, so that one gather writes the text.
    table = np.concatenate([words, np.frombuffer(b"".join(separators), dtype=np.uint8)])
    piece_sizes = np.concatenate([sizes, [len(piece) for piece in separators]])
    piece_starts = np.cumsum(piece_sizes) - piece_sizes
    zipf = np.cumsum(1 / (np.arange(len(sizes)) + 2.7) ** 1.05)
    left = megabytes * 1_000_000
    while left > 0:
        count = 500_000
        ids = np.searchsorted(zipf, rng.random(count) * zipf[-1])
        ends = rng.choice(4, size=count, p=[0.87, 0.06, 0.06, 0.01])
        pieces = np.empty(2 * count, dtype=np.int64)
        pieces[0::2], pieces[1::2] = ids, len(sizes) + ends
        stops = np.cumsum(piece_sizes[pieces])
        starts = stops - piece_sizes[pieces]
        gather = np.repeat(piece_starts[pieces] - starts, piece_sizes[pieces])
        text = table[gather + np.arange(stops[-1])]
        text[starts[0::2][1:][ends[:-1] >= 2]] -= 32  # sentences start with a capital
        lengths = np.exp(rng.normal(np.log(400), 1.0, size=count // 300)).astype(int) + 20
        cuts = starts[0::2][np.cumsum(lengths)[np.cumsum(lengths) < count]]
        for document in np.split(text, cuts):
            yield document.tobytes().decode("ascii").strip()
            left -= len(document)
            if left <= 0:
                return


def python_sources(megabytes: int) -> Iterator[str]:
    """Yield the sources of the installed packages, one file a document, up to so many megabytes."""
    left = megabytes * 1_000_000
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if not text.strip():
            continue
        yield text
        left -= len(text.encode())
        if left <= 0:
            return


def make_corpus(
    work: Path, megabytes: int, kind: str = "words", fmt: str = "jsonl", shards: int = 1
) -> Path:
    """Return the folder of a corpus of so many shards, made if it is missing."""
    folder = work / f"{kind}-{megabytes}mb-{fmt}-{shards}"
    if folder.exists():
        return folder
    print(f"making {folder.name}", file=sys.stderr)
    partial = work / f"{folder.name}.partial"  # renamed when whole: no half corpus is measured
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    made = min(megabytes, BLOCK_MB)
    texts = list(make_documents(made) if kind == "words" else python_sources(made))
    repeats = max(1, megabytes // BLOCK_MB)
    for index, part in enumerate(np.array_split(np.arange(len(texts)), shards)):
        rows = [texts[i] for i in part.tolist()]
        name = partial / f"{index:06d}.{fmt}"
        if fmt == "parquet":
            pq.write_table(pa.table({"text": rows * repeats}), name, row_group_size=256)
        else:
            block = "".join(json.dumps({"text": text}) + "\n" for text in rows)
            with name.open("w") as file:
                for _ in range(repeats):
                    file.write(block)
    partial.rename(folder)
    return folder


def make_token_corpus(work: Path, texts: Path, tokenizer: Path, fmt: str) -> Path:
    """Return a corpus's documents as token ids with BOS and EOS, an int32 list a row.

    ``fmt`` is `parquet`, or `arrow` for an Arrow stream, as Hugging Face datasets saves it.
    """
    from torchtitan_zephon.ops.tokenize import load_tokenizer
    from torchtitan_zephon.recipe import TokenizerConfig

    folder = work / f"{texts.name}-tokens-{fmt}"
    if not folder.exists():
        print(f"making {folder.name}", file=sys.stderr)
        encode = load_tokenizer(TokenizerConfig(path=str(tokenizer))).encode
        partial = work / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for shard in sorted(texts.glob("*.parquet")):
            ids, bounds = encode(pq.read_table(shard)["text"].to_pylist())
            lists = pa.ListArray.from_arrays(bounds.astype(np.int32), ids)
            table = pa.table({"input_ids": lists})
            path = partial / f"{shard.stem}.{fmt}"
            if fmt == "parquet":
                pq.write_table(table, path, row_group_size=256)
            else:
                with (
                    pa.OSFile(str(path), "wb") as file,
                    pa.ipc.new_stream(file, table.schema) as to,
                ):
                    to.write_table(table, max_chunksize=1000)
        partial.rename(folder)
    return folder


def make_one_word_documents(work: Path, characters: int, megabytes: int) -> Path:
    """Return a corpus whose documents are each one word of so many letters."""
    folder = work / f"one-word-{characters}-{megabytes}mb"
    if not folder.exists():
        partial = work / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        rng = np.random.default_rng(0)
        letters = rng.integers(97, 123, size=max(4, megabytes * 1_000_000 // characters + 1))
        with (partial / "corpus.jsonl").open("wb") as file:
            for first in letters.astype(np.uint8).tolist():
                word = rng.integers(97, 123, size=characters, dtype=np.uint8)
                word[0] = first
                file.write(b'{"text":"' + word.tobytes() + b'"}\n')
        partial.rename(folder)
    return folder


def make_tiny_shards(work: Path, count: int) -> Path:
    """Return a folder of so many JSONL shards of one document each."""
    folder = work / f"shards-{count}"
    if not folder.exists():
        print(f"making {folder.name}", file=sys.stderr)
        partial = work / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        texts = itertools.cycle(list(make_documents(1)))
        for i, text in zip(range(count), texts, strict=False):
            line = json.dumps({"text": text[:2000]}) + "\n"
            (partial / f"{i:06d}.jsonl").write_text(line)
        partial.rename(folder)
    return folder


def make_tokenizer(work: Path, entries: int = VOCAB_SIZE) -> Path:
    """Return the folder of a byte-level BPE tokenizer of so many entries, made if it is missing."""
    folder = work / f"tokenizer-{entries}"
    if not (folder / "tokenizer_config.json").exists():
        print(f"training {folder.name}", file=sys.stderr)
        train_tokenizer(make_documents(16, seed=1), entries, folder)
    return folder


def make_byte_tokenizer(work: Path) -> Path:
    """Return the folder of a tokenizer that makes one token of each byte."""
    folder = work / "tokenizer-bytes"
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = {char: i for i, char in enumerate(byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([BOS, EOS])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "bos_token": BOS,
            "eos_token": EOS,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    return folder


def byte_characters() -> Iterable[str]:
    """Yield the character that stands for each byte in a byte-level BPE vocabulary (GPT-2's)."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    beyond = itertools.count(256)
    return [chr(byte if byte in shown else next(beyond)) for byte in range(256)]
