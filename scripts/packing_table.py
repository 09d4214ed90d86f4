"""Prints, as Markdown, what each packing algorithm makes of documents of realistic lengths.

Usage: python scripts/packing_table.py [--mean TOKENS] [--documents N]

Lengths are lognormal and the same in every run; the ids, which no packer looks at, are random. A
segment has 16 rows, as in a lane of 64 that shuffle 1,000 sequences. Rows that only the end of the
data finishes are left out.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass

import numpy as np

from torchtitan_zephon.ops.bins import Bins
from torchtitan_zephon.ops.documents import Documents, Packer, Rows
from torchtitan_zephon.ops.wrap import Wrap
from torchtitan_zephon.recipe import PackingConfig

SIGMA = 1.2
SEGMENT_ROWS = 16
RUNS = 5  # of which the fastest counts

PACKINGS = [
    PackingConfig(algorithm="wrap"),
    PackingConfig(algorithm="none"),
    *(
        PackingConfig(algorithm=algorithm, open_bins=open_bins)
        for algorithm in ("first_fit", "best_fit", "best_fit_wrap")
        for open_bins in (1, 16, 64)
    ),
    PackingConfig(algorithm="best_fit", long_documents="truncate"),
    PackingConfig(algorithm="best_fit", long_documents="drop"),
]


@dataclass(frozen=True)
class Outcome:
    """What became of a corpus."""

    filled: float
    """Share of places that are not padding."""
    split: float
    """Share of documents in more than one piece."""
    needless: float
    """Share of documents in more than one piece that are no longer than a row."""
    context: float
    """Of the earlier tokens of its own document that a token could see at this row length, the
    share that are in its row, over the documents that came out in full."""
    dropped: float
    """Share of tokens dropped."""
    speed: float
    """Tokens per CPU-second of push, take and flush."""


def corpus(mean: float, count: int) -> Documents:
    """Documents of two tokens or more, with lognormal lengths of this mean."""
    lengths = random.Random(0)
    mu = math.log(mean) - SIGMA**2 / 2
    sizes = [max(2, round(lengths.lognormvariate(mu, SIGMA))) for _ in range(count)]
    bounds = np.cumsum([0, *sizes], dtype=np.int64)
    places = np.zeros((count, 4), dtype=np.int64)
    places[:, 3] = np.arange(count)
    tokens = np.random.default_rng(0).integers(0, 100_000, bounds[-1], dtype=np.int32)
    return Documents(tokens, bounds, places)


def packer_for(config: PackingConfig, seq_len: int) -> Packer:
    return Wrap(seq_len, 0) if config.algorithm == "wrap" else Bins(config, seq_len, 0, [0])


def pack(packer: Packer, documents: Documents) -> tuple[list[Rows], float]:
    """The whole segments that the documents fill, and the CPU-seconds of packing."""
    bounds = documents.bounds
    pairs = bounds - np.arange(len(bounds))
    made, at, seconds = [], 0, 0.0
    while True:
        seconds -= time.process_time()
        packer.begin(SEGMENT_ROWS)
        seconds += time.process_time()
        while not packer.full:
            if at == len(documents):
                return made, seconds
            stop = int(np.searchsorted(pairs, pairs[at] + packer.wanted())) + 1
            stop = min(stop, len(documents))
            window = Documents(
                documents.tokens[bounds[at] : bounds[stop]],
                bounds[at : stop + 1] - bounds[at],
                documents.places[at:stop],
            )
            seconds -= time.process_time()
            at += packer.push(window)
            seconds += time.process_time()
        seconds -= time.process_time()
        made.append(packer.take())
        packer.flush()
        seconds += time.process_time()


def measure(config: PackingConfig, seq_len: int, documents: Documents) -> Outcome:
    """Packs the documents, several times over for the speed."""
    made, seconds = pack(packer_for(config, seq_len), documents)
    for _ in range(RUNS - 1):
        seconds = min(seconds, pack(packer_for(config, seq_len), documents)[1])
    pairs = np.diff(documents.bounds) - 1
    pieces = np.concatenate([rows.pieces for rows in made])
    document, sizes = pieces[:, 5], (pieces[:, 7] - pieces[:, 6]).astype(float)
    split = np.bincount(document, minlength=len(documents)) > 1
    whole = np.bincount(document, sizes, len(documents)) == pairs
    seen = np.bincount(document, sizes**2, len(documents))[whole].sum()
    could_see = (pairs // seq_len * seq_len**2 + (pairs % seq_len) ** 2)[whole].sum()
    places = sum(rows.tokens.size for rows in made)
    return Outcome(
        filled=1 - sum(rows.padding for rows in made) / places,
        split=float(np.mean(split)),
        needless=float(np.mean(split & (pairs <= seq_len))),
        context=float(seen / could_see),
        dropped=sum(rows.dropped for rows in made) / int(pairs.sum()),
        speed=len(documents.tokens) / seconds,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What each packing algorithm makes of a corpus.")
    parser.add_argument("--mean", type=float, default=600, help="mean length of a document, tokens")
    parser.add_argument("--documents", type=int, default=10_000)
    arguments = parser.parse_args()
    documents = corpus(arguments.mean, arguments.documents)
    print(
        f"{len(documents):,} documents, {len(documents.tokens):,} tokens: lognormal lengths, mean "
        f"{len(documents.tokens) / len(documents):.0f}, sigma {SIGMA}.\n"
    )
    print(
        "| seq_len | algorithm | open_bins | long_documents | filled | split | needlessly "
        "| context | dropped | M tokens/CPU-s |\n|--:|---|--:|---|--:|--:|--:|--:|--:|--:|"
    )
    for seq_len in (2048, 8192):
        for config in PACKINGS:
            out = measure(config, seq_len, documents)
            open_bins = "" if config.algorithm in ("wrap", "none") else config.open_bins
            print(
                f"| {seq_len} | {config.algorithm} | {open_bins} | {config.long_documents} "
                f"| {out.filled:.2%} | {out.split:.1%} | {out.needless:.1%} "
                f"| {out.context:.1%} | {out.dropped:.1%} | {out.speed / 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
