"""Tokenizing, the worker that turns the texts of a block into the token ids of its documents.

The reference is what the user named: a Hugging Face tokenizer through ``tokenizers``, or a tiktoken
encoding through ``tiktoken``. ``gigatoken`` is many times faster and young, so it works only after
it gave the reference's answers on a probe and on documents of the run.
"""

import ctypes
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gigatoken
import numpy as np

from torchtitan_zephon.ops.references import (
    Encode,
    Ids,
    Reference,
    TokenizerError,
    load_reference,
)
from torchtitan_zephon.recipe import TokenizerConfig

logger = logging.getLogger(__name__)

PROBE = (
    "",
    " ",
    "a",
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it? I'LL we'Ve THEY'RE\n",
    "def f(x):\n\treturn {'a': x ** 2,\r\n            'b': [1234567890, 3.14e-10, 0xFF]}\n\n\n\n",
    "  leading,   inner    and trailing spaces   \t\t \n \n",
    "Grüße, señor; ça va? Ελληνικά, русский текст, עברית, العربية, हिन्दी, ไทย",
    "日本語と中文混じりの文章。全角１２３、한국어도",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 ❤️ e\u0301 \u00e9 \u200b\u2028\u2029\u00a0\u3000\ufeff",
    "\x00\x01\x7f\u0085\U0010ffff \ue000 ﬁ ½ ² Ⅷ İ ß ſ",
    "antidisestablishmentarianism" * 20,
    "=" * 70 + "-" * 33 + "\n" + "!?" * 17 + "'''\"\"\"```",
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\path\\file.txt $x_1^{n+1}$",
    "<s></s><|endoftext|><|begin_of_text|><|end_of_text|><pad>[CLS][SEP]<bos><eos><unk>",
)
"""Texts on which a backend must agree with the reference; part of a tokenizer's identity."""

# encode_batch wraps its result in Python objects at a tenth of a millisecond a call; encode costs
# each text a microsecond. Of 256 KiB, in ns a token: 8.2 against 10.2 for 52 texts, 13 against 13
# for 262, 27 against 16 for 1310.
_BATCH_FROM = 300
# gigatoken's word cache grows by 25 MB on the first 128 MB of Python sources, by 7 MB a MB of text
# where every word is a new one. A new instance takes a tenth of a second.
_RENEW_CHECK = 1 << 22  # characters of text between two looks at the memory that it takes
_RENEW_GROWTH = 1 << 27  # growth of the process, in bytes, at which the instance is renewed
_RENEW_BLIND = 1 << 26  # characters after which it is renewed where no figure is to be had


@dataclass(frozen=True)
class DocumentTokenizer:
    """Texts in, documents of token ids out, BOS and EOS added as TorchTitan's tokenizer does."""

    encode_plain: Encode
    decode: Callable[[list[int]], str]
    prefix: Ids
    """Ids put before each document: BOS, where the tokenizer has one."""
    suffix: Ids
    """Ids put behind each document: EOS, where the tokenizer has one."""
    eos_id: int | None
    vocab_size: int
    special_tokens: str
    """Whether special tokens' texts in documents are ``text``, or are to be ``parse``-d."""
    backend: str
    identity: dict[str, Any]
    """Fingerprint: the tokenizer's contents and its reference's answer to the probe."""

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all texts in a row, int32 [N], and their bounds, int64 [len(texts) + 1]."""
        return self.encode_plain(texts, self.prefix, self.suffix)


def load_tokenizer(
    config: TokenizerConfig, backend: str = "auto", samples: list[str] | None = None
) -> DocumentTokenizer:
    """The tokenizer of a recipe.

    Args:
        config: where it is and how special tokens in texts are treated.
        backend: ``auto``, ``gigatoken``, ``tokenizers`` or ``tiktoken``.
        samples: documents of the run on which gigatoken must agree, besides ``PROBE``.

    Raises:
        TokenizerError: nothing usable at ``config.path``; a backend, asked for by name, that cannot
            read this tokenizer or gives other ids.
    """
    reference = load_reference(config)
    probe_ids, probe_bounds = reference.encode(list(PROBE))
    if len(probe_ids) and int(probe_ids.max()) > np.iinfo(np.int32).max:
        raise TokenizerError(f"tokenizer {config.path!r}: token ids do not fit 32 bits")
    encode, used = reference.encode, reference.backend
    if backend in ("auto", "gigatoken"):
        fast, fault = _checked_gigatoken(reference, [*PROBE, *(samples or [])])
        if fast is not None:
            encode, used = fast, "gigatoken"
        elif backend == "gigatoken":
            raise TokenizerError(
                f"tokenizer {config.path!r}: gigatoken {fault}; set "
                f"zephon.runtime.tokenizer_backend to 'auto' or {reference.backend!r}"
            )
        else:
            logger.warning("tokenizer %s: gigatoken %s; %s does the work", config.path, fault, used)
    elif backend != reference.backend:
        raise TokenizerError(
            f"tokenizer {config.path!r}: backend {backend!r} cannot read it; "
            f"use 'auto', 'gigatoken' or {reference.backend!r}"
        )
    answer = hashlib.sha256(
        probe_ids.astype("<i4").tobytes() + probe_bounds.astype("<i8").tobytes()
    )
    return DocumentTokenizer(
        encode_plain=encode,
        decode=reference.decode,
        prefix=reference.prefix,
        suffix=reference.suffix,
        eos_id=reference.eos_id,
        vocab_size=reference.vocab_size,
        special_tokens=config.special_tokens,
        backend=used,
        identity={
            "contents": reference.contents,
            "probe": answer.hexdigest(),
            "special_tokens": config.special_tokens,
            "prefix": list(reference.prefix),
            "suffix": list(reference.suffix),
        },
    )


@dataclass(frozen=True)
class TokenIds:
    """Documents that are token ids already: they are looked at and laid end to end."""

    vocab_size: int

    def __call__(self, documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all documents in a row, int32 [N], and their bounds, int64 [n + 1].

        Raises:
            ValueError: an id that the tokenizer does not have.
        """
        ids = np.concatenate([np.empty(0, dtype=np.int32), *documents])
        bounds = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum([*map(len, documents)], out=bounds[1:])
        # Seen as unsigned, an id below 0 is a large one.
        if len(ids) and int(ids.view(np.uint32).max()) >= self.vocab_size:
            bad = ids[ids.view(np.uint32) >= self.vocab_size][0]
            raise ValueError(
                f"a document holds the token id {bad}; the tokenizer has ids from 0 to "
                f"{self.vocab_size - 1}: were these ids made with another one?"
            )
        return ids, bounds


class _Gigatoken:
    """gigatoken's encode, on an instance that is renewed when its word cache has grown too far."""

    def __init__(self, make: Callable[[], gigatoken.Tokenizer]):
        self._make = make
        self._renew()

    def _renew(self) -> None:
        self._tokenizer: gigatoken.Tokenizer | None = None  # let go of the old before the new
        _give_back_freed_memory()
        self._tokenizer = self._make()
        self._text = self._looked = 0  # characters, and how many there were at the last look
        self._resident = _resident_bytes()

    def __call__(
        self, texts: list[str], prefix: Ids = (), suffix: Ids = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._text - self._looked > _RENEW_CHECK:
            self._looked, resident = self._text, _resident_bytes()
            if resident is None or self._resident is None:
                grown = self._text > _RENEW_BLIND
            else:
                grown = resident - self._resident > _RENEW_GROWTH
            if grown:
                self._renew()
        self._text += sum(map(len, texts))
        assert self._tokenizer is not None
        backend = self._tokenizer.backend
        before, behind = np.array(prefix, dtype=np.uint32), np.array(suffix, dtype=np.uint32)
        if len(texts) < _BATCH_FROM:
            rows = [*map(backend.encode, texts)]
            bounds = np.zeros(len(rows) + 1, dtype=np.int64)
            np.cumsum([*map(len, rows)], out=bounds[1:])
            bounds += (len(prefix) + len(suffix)) * np.arange(len(bounds))
            parts = [before, before[:0], behind] * len(rows)
            parts[1::3] = rows
            return np.concatenate([before[:0], *parts]).view(np.int32), bounds
        layout: Any = backend.encode_batch(texts, parallel=False).layout
        bounds = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[bounds[0] : bounds[-1]].view(np.int32)
        return _surrounded(ids, bounds - bounds[0], before, behind)


def _surrounded(
    ids: np.ndarray, bounds: np.ndarray, before: np.ndarray, behind: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Documents with ids put before and behind each."""
    extra = len(before) + len(behind)
    if extra == 0:
        return ids, bounds
    out_bounds = bounds + extra * np.arange(len(bounds), dtype=np.int64)
    out = np.empty(int(out_bounds[-1]), dtype=np.int32)
    inner = np.ones(len(out), dtype=bool)
    for i, token in enumerate(before):
        out[out_bounds[:-1] + i] = token
        inner[out_bounds[:-1] + i] = False
    for i, token in enumerate(behind[::-1], start=1):
        out[out_bounds[1:] - i] = token
        inner[out_bounds[1:] - i] = False
    out[inner] = ids
    return out, out_bounds


def _give_back_freed_memory() -> None:
    """Let the C library return to the system what was freed: else caches grow into it unseen."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, not of others
        if trim is not None:
            trim(0)


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # a system without /proc
        return None


def _checked_gigatoken(reference: Reference, texts: list[str]) -> tuple[Encode | None, str]:
    try:
        fast = _Gigatoken(reference.gigatoken)
        for text in texts:
            got, want = fast([text])[0], reference.encode([text])[0]
            if not np.array_equal(got, want):
                return None, f"gives other ids for {text[:60]!r}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Whatever a young library raises, the reference can do the work. A panic of its Rust code
        # is no Exception.
        return None, f"cannot load this tokenizer ({error})"
    return fast, ""
