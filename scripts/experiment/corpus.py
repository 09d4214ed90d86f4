"""The experiments' data: what comes with every Python, as short documents in random order."""

import random
from pathlib import Path

from prepare_demo_data import code_documents, prose_documents, train_tokenizer, write_jsonl

DOCUMENT_CHARACTERS = 1000
"""A whole source file is some twenty times as long: one would fill several batches."""
HELD_OUT_EVERY = 40


def paragraphs(text: str, characters: int) -> list[str]:
    """Cut a text at empty lines into documents of up to about so many characters."""
    documents, document = [], ""
    for paragraph in text.split("\n\n"):
        if document and len(document) + len(paragraph) > characters:
            documents.append(document)
            document = ""
        document += paragraph + "\n\n"
    return [d for d in [*documents, document] if d.strip()]


def prepare(folder: Path, seed: int, vocab_size: int) -> None:
    """Write FOLDER/train/SEED/documents.jsonl, FOLDER/held_out.jsonl and FOLDER/tokenizer.

    The order of the training documents follows from the seed; what is held out does not. Documents
    are shuffled so that every part of the file is like every other: the stock loader gives each
    rank a part of its own.
    """
    texts = prose_documents() + code_documents()
    documents = [d for text in texts for d in paragraphs(text, DOCUMENT_CHARACTERS)]
    random.Random(0).shuffle(documents)
    held_out = documents[::HELD_OUT_EVERY]
    train = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY]
    random.Random(seed).shuffle(train)
    write_jsonl(train, folder / f"train/{seed}/documents.jsonl")
    write_jsonl(held_out[:64], folder / "held_out.jsonl")
    if not (folder / "tokenizer/tokenizer_config.json").exists():
        train_tokenizer(train, vocab_size, folder / "tokenizer")
