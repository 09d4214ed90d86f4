"""Tokens of rendered conversations, in which only the template may write special tokens."""

import json
import re
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from torchtitan_zephon.ops.references import (
    NAMED_TOKENS,
    TokenizerError,
    added_token,
    read_folder,
    token_text,
)
from torchtitan_zephon.ops.tokenize import PROBE, DocumentTokenizer

# Characters that Unicode keeps out of texts ("noncharacters"), so they are free to mean something.
_STAND_IN = "\ufdd0"  # stands for a special token of the template
_QUOTE = "\ufdd1"  # around the number of a special token that a message quotes
_QUOTED = re.compile(f"{_QUOTE}([0-9]+){_QUOTE}")


class Rendered(NamedTuple):
    """A text to tokenize."""

    text: str
    boundaries: list[int]
    """Characters before which tokens are to be counted."""
    quoted: bool
    """Whether special tokens that messages quote are written by ``ChatTokenizer.quote``."""


class Encoded(NamedTuple):
    """A text's tokens."""

    ids: np.ndarray
    """Token ids, int32 [n]."""
    counts: list[int]
    """For each boundary, how many tokens begin before it."""


class ChatTokenizer:
    """Tokenizes whole conversations as TorchTitan's tokenizer does.

    There are two ways, with the same answer. The reference is ``tokenizers``, which tokenizes a
    text at once and tells where its tokens begin. Some tens of times faster is the run's tokenizer
    on the pieces between special tokens, where it is gigatoken: a byte-level tokenizer treats the
    pieces independently of each other, and the bytes of its tokens add up to those of the text. The
    latter is checked of every piece, both together on a probe when the tokenizer is loaded.

    Args:
        tokenizer: the run's tokenizer.
        folder: its Hugging Face folder.

    Raises:
        TokenizerError: the folder cannot be read.
    """

    def __init__(self, tokenizer: DocumentTokenizer, folder: Path):
        self._whole, self.settings, self.named, special = _read_tokenizer(folder)
        serialized = json.loads(self._whole.to_str())
        # The longest wins, as in the library.
        added = sorted(serialized["added_tokens"], key=lambda t: len(t["content"]), reverse=True)
        self._ids = {t["content"]: t["id"] for t in added}
        self._added = _any_of(map(_pattern, added))
        self._texts = [t["content"] for t in added if t["content"] in special]
        self._quotable = _any_of(map(re.escape, self._texts))
        self._special = _any_of(_pattern(t) for t in added if t["content"] in special)
        # Some tokenizers look for special tokens after normalization, which can make new ones.
        normalizer = self._whole.normalizer if any(t["normalized"] for t in added) else None
        self._normalize = None if normalizer is None else normalizer.normalize_str
        for token in added:
            token["special"] = token["content"] in special
        self._plain = Tokenizer.from_str(json.dumps(serialized))
        self._plain.encode_special_tokens = True
        self._plain.add_tokens([AddedToken(_STAND_IN, normalized=False)])
        self._stand_in = self._plain.token_to_id(_STAND_IN)
        self._encode_plain = tokenizer.encode_plain
        self._token_bytes = _token_bytes(self._whole, added)
        self.by_pieces = tokenizer.backend == "gigatoken" and self._pieces_agree()
        """Whether the faster way is taken."""

    def quotes(self, text: str) -> bool:
        """Whether a message's text would give a special token."""
        if self._quotable.search(text):
            return True
        return self._normalize is not None and bool(self._quotable.search(self._normalize(text)))

    def quote(self, value: Any) -> Any:
        """Messages with a number in place of each special token's text."""
        if isinstance(value, str):
            return self._quotable.sub(
                lambda match: f"{_QUOTE}{self._texts.index(match[0])}{_QUOTE}", value
            )
        if isinstance(value, list):
            return [self.quote(v) for v in value]
        if isinstance(value, dict):
            return {self.quote(k): self.quote(v) for k, v in value.items()}
        return value

    def encode(self, texts: list[Rendered]) -> list[Encoded]:
        """The tokens of each text."""
        encoded = self._encode_pieces(texts) if self.by_pieces else None
        return self._encode_whole(texts) if encoded is None else encoded

    def _unquote(self, text: str) -> str:
        return _QUOTED.sub(lambda match: self._texts[int(match[1])], text)

    def _id(self, found: str) -> int:
        return self._ids[found if found in self._ids else found.strip()]

    def _encode_whole(self, texts: list[Rendered]) -> list[Encoded]:
        plain = [r.text for r in texts if not r.quoted]
        encodings = iter(self._whole.encode_batch(plain, add_special_tokens=False))
        return [
            self._encode_quoted(r) if r.quoted else _read(next(encodings), r.boundaries)
            for r in texts
        ]

    def _encode_quoted(self, rendered: Rendered) -> Encoded:
        """The reference where messages quote special tokens.

        The template's become a stand-in, the messages' get their text back, which this tokenizer
        leaves alone. Not piece by piece: some tokenizers treat the beginning of a text in a way of
        its own.
        """
        text = rendered.text
        specials = [self._id(found) for found in self._special.findall(text)]

        def written(part: str) -> str:
            return self._unquote(self._special.sub(_STAND_IN, part))

        encoding = self._plain.encode(written(text), add_special_tokens=False)
        encoded = _read(encoding, [len(written(text[:b])) for b in rendered.boundaries])
        encoded.ids[encoded.ids == self._stand_in] = specials
        return encoded

    def _encode_pieces(self, texts: list[Rendered]) -> list[Encoded] | None:
        """All texts by the run's tokenizer; None where it cannot tell where tokens begin."""
        pieces: list[str] = []
        behind, sizes = [], []  # id and bytes of the added token behind each piece
        last = []  # the piece at the end of each text, which has none behind it
        for text, _, quoted in texts:
            at = 0
            for match in self._added.finditer(text):
                pieces.append(text[at : match.start()])
                behind.append(self._id(match[0]))
                sizes.append(len(match[0].encode()))
                at = match.end()
            last.append(len(pieces))
            pieces.append(text[at:])
            behind.append(-1)
            sizes.append(0)
            if quoted:
                begin = last[-2] + 1 if len(last) > 1 else 0
                pieces[begin:] = map(self._unquote, pieces[begin:])
        ids, bounds = self._encode_plain(pieces)
        lengths = self._token_bytes[ids]
        ends = np.concatenate([[0], np.cumsum(lengths)])[bounds]
        if not np.array_equal(np.diff(ends), [len(p.encode()) for p in pieces]):
            return None
        ids = np.insert(ids, bounds[1:], behind)
        lengths = np.insert(lengths, bounds[1:], sizes)
        starts = np.cumsum(lengths) - lengths
        stops = bounds[1:] + np.arange(len(pieces))  # where the added tokens are now
        out, begin = [], 0
        for rendered, stop in zip(texts, stops[last].tolist(), strict=True):
            counts = []
            if rendered.boundaries:
                base = starts[begin]
                places = [base + self._bytes_before(rendered, b) for b in rendered.boundaries]
                counts = np.searchsorted(starts[begin:stop], places).tolist()
            out.append(Encoded(ids[begin:stop], counts))
            begin = stop + 1
        return out

    def _bytes_before(self, rendered: Rendered, boundary: int) -> int:
        if not rendered.quoted and rendered.text.isascii():
            return boundary
        before = rendered.text[:boundary]
        return len((self._unquote(before) if rendered.quoted else before).encode())

    def _pieces_agree(self) -> bool:
        between = self._texts or [""]
        text = "".join(between[i % len(between)] + probe for i, probe in enumerate(PROBE))
        probes = [Rendered(text, list(range(len(text))), False)]
        probes += [Rendered(probe, [], False) for probe in PROBE]
        got = self._encode_pieces(probes)
        return got is not None and all(
            np.array_equal(a.ids, b.ids) and a.counts == b.counts
            for a, b in zip(got, self._encode_whole(probes), strict=True)
        )


def _token_bytes(tokenizer: Tokenizer, added: list[dict[str, Any]]) -> np.ndarray:
    """Bytes of text that each id stands for, if the tokenizer is a byte-level one, int64 [ids].

    In the vocabulary of such a tokenizer each character stands for a byte.
    """
    lengths = {i: len(token) for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    lengths |= {t["id"]: len(t["content"].encode()) for t in added}
    out = np.zeros(max(lengths, default=-1) + 1, dtype=np.int64)
    out[list(lengths)] = list(lengths.values())
    return out


def _read(encoding: Any, boundaries: list[int]) -> Encoded:
    starts = [start for start, _ in encoding.offsets] if boundaries else []
    counts = [bisect_left(starts, b) for b in boundaries]
    return Encoded(np.array(encoding.ids, dtype=np.int32), counts)


def _read_tokenizer(
    folder: Path,
) -> tuple[Tokenizer, dict[str, Any], dict[str, str], set[str]]:
    """The tokenizer as TorchTitan sets it up, its settings, its named and its special tokens."""
    tokenizer = read_folder(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None  # it may trim offsets
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
        tables = {f"{n}_token": settings.get(f"{n}_token") for n in NAMED_TOKENS}
        tables = {name: t for name, t in tables.items() if t is not None}
        named = {name: token_text(t) for name, t in tables.items()}
        listed = list(settings.get("added_tokens_decoder", {}).values())
        # add_special_tokens makes special whatever it is given. "<think>" and its like, which
        # messages use, are to be told apart.
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        special |= {*named.values(), *(t["content"] for t in listed if t.get("special", True))}
        tokenizer.add_special_tokens([added_token(t) for t in [*tables.values(), *listed]])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path}: {error!r}") from error
    return tokenizer, settings, named, special


def _pattern(token: dict[str, Any]) -> str:
    """What the library takes for the token: with the whitespace beside it, where it says so."""
    left, right = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
    return left + re.escape(token["content"]) + right


def _any_of(patterns: Any) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or "(?!)")
