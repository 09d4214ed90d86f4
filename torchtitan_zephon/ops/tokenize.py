"""Tokenizing, the worker that turns the texts of a block into the token ids of its documents.

The reference is what the user named: a Hugging Face tokenizer through ``tokenizers``, or a tiktoken
encoding through ``tiktoken``. ``gigatoken`` is many times faster and young, so it works only after
it gave the reference's answers on a probe and on documents of the run.
"""

import base64
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gigatoken
import numpy as np
import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from torchtitan_zephon.recipe import TokenizerConfig, digest_json

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

_RENEW_CHECK = 1 << 26  # bytes of text between two looks at the memory of gigatoken's word cache
_RENEW_GROWTH = 1 << 28  # growth of the process, in bytes, at which its instance is renewed


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or a backend that cannot stand in for it."""


# (texts) -> (ids of all texts in a row, int32 [N]; bounds, int64 [len(texts) + 1])
Encode = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class DocumentTokenizer:
    """Texts in, documents of token ids out, BOS and EOS added as TorchTitan's tokenizer does."""

    encode_plain: Encode
    decode: Callable[[list[int]], str]
    prefix: tuple[int, ...]
    """Ids put before each document: BOS, where the tokenizer has one."""
    suffix: tuple[int, ...]
    """Ids put behind each document: EOS, where the tokenizer has one."""
    eos_id: int | None
    vocab_size: int
    backend: str
    identity: dict[str, Any]
    """Fingerprint: the tokenizer's contents and its reference's answer to the probe."""

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all texts in a row, int32 [N], and their bounds, int64 [len(texts) + 1]."""
        ids, bounds = self.encode_plain(texts)
        extra = len(self.prefix) + len(self.suffix)
        if extra == 0:
            return ids, bounds
        out_bounds = bounds + extra * np.arange(len(bounds), dtype=np.int64)
        out = np.empty(int(out_bounds[-1]), dtype=np.int32)
        inner = np.ones(len(out), dtype=bool)
        for i, token in enumerate(self.prefix):
            out[out_bounds[:-1] + i] = token
            inner[out_bounds[:-1] + i] = False
        for i, token in enumerate(reversed(self.suffix), start=1):
            out[out_bounds[1:] - i] = token
            inner[out_bounds[1:] - i] = False
        out[inner] = ids
        return out, out_bounds


@dataclass(frozen=True)
class _Reference:
    """A tokenizer as its own library runs it, and how to make gigatoken's version of it."""

    backend: str
    encode: Encode
    decode: Callable[[list[int]], str]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    eos_id: int | None
    vocab_size: int
    contents: str
    gigatoken: Callable[[], gigatoken.Tokenizer]


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
    if not config.path:
        raise TokenizerError("path: missing, and TorchTitan's hf_assets_path is not set either")
    parse = config.special_tokens == "parse"
    path = Path(config.path)
    reference = _hugging_face(path, parse) if path.is_dir() else _tiktoken(config, parse)
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
        backend=used,
        identity={
            "contents": reference.contents,
            "probe": answer.hexdigest(),
            "special_tokens": config.special_tokens,
            "prefix": list(reference.prefix),
            "suffix": list(reference.suffix),
        },
    )


def _from_lists(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    bounds = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(r) for r in rows], out=bounds[1:])
    ids = np.fromiter((i for row in rows for i in row), dtype=np.int32, count=int(bounds[-1]))
    return ids, bounds


# -- Hugging Face folders ------------------------------------------------------------------------

_NAMED_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


def _hugging_face(folder: Path, parse: bool) -> _Reference:
    tokenizer = _read_folder(folder)
    tokenizer.no_truncation()  # a limit meant for inference must not cut training documents
    tokenizer.no_padding()
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    named = {name: settings.get(f"{name}_token") for name in _NAMED_TOKENS}
    tokenizer.add_special_tokens(
        [_added_token(t) for t in named.values() if t is not None]
        + [_added_token(t) for t in settings.get("added_tokens_decoder", {}).values()]
    )
    bos_id, eos_id = (
        None if named[n] is None else tokenizer.token_to_id(_content(named[n]))
        for n in ("bos", "eos")
    )
    # What the tokenizer's own post-processing puts around a text; BOS and EOS join it only where
    # it does not add them itself.
    own = tokenizer.encode("").ids
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    lead = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    if lead is None:
        raise TokenizerError(
            f"tokenizer {str(folder)!r}: its post-processing changes a text's own tokens"
        )
    prefix, suffix = whole[:lead], whole[lead + len(plain) :]
    if bos_id is not None and bos_id not in own:
        prefix = [bos_id, *prefix]
    if eos_id is not None and eos_id not in own:
        suffix = [*suffix, eos_id]
    serialized = json.loads(tokenizer.to_str())
    contents = digest_json(serialized)
    tokenizer.encode_special_tokens = not parse
    serialized["post_processor"] = None
    if not parse:
        serialized["added_tokens"] = [t for t in serialized["added_tokens"] if not t["special"]]

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        batch = tokenizer.encode_batch(texts, add_special_tokens=False)
        return _from_lists([e.ids for e in batch])

    return _Reference(
        backend="tokenizers",
        encode=encode,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        eos_id=eos_id,
        vocab_size=tokenizer.get_vocab_size(),
        contents=contents,
        gigatoken=lambda: gigatoken.Tokenizer.from_json(json.dumps(serialized)),
    )


def _read_folder(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{folder / 'tokenizer.json'}: {error}") from error
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    raise TokenizerError(
        f"tokenizer {str(folder)!r}: the folder has neither tokenizer.json nor vocab.json with "
        "merges.txt"
    )


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _added_token(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(token, special=True)
    return AddedToken(
        token["content"],
        single_word=token.get("single_word", False),
        lstrip=token.get("lstrip", False),
        rstrip=token.get("rstrip", False),
        normalized=token.get("normalized", True),
        special=token.get("special", True),
    )


# -- tiktoken ------------------------------------------------------------------------------------

_PRETOKENIZERS = {
    "gpt2": "gpt2",
    "r50k_base": "r50k",
    "cl100k_base": "cl100k",
    "o200k_base": "o200k",
}


def _tiktoken(config: TokenizerConfig, parse: bool) -> _Reference:
    encoding = _rank_file(config) if Path(config.path).is_file() else _encoding_named(config.path)
    eos_id = encoding._special_tokens.get("<|endoftext|>")
    ranks, specials = encoding._mergeable_ranks, encoding._special_tokens
    contents = hashlib.sha256()
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        contents.update(b"%d %s\n" % (rank, base64.b64encode(token)))
    contents.update(json.dumps([encoding._pat_str, sorted(specials.items())]).encode())

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if parse:
            return _from_lists([encoding.encode(t, allowed_special="all") for t in texts])
        return _from_lists([encoding.encode_ordinary(t) for t in texts])

    def fast() -> gigatoken.Tokenizer:
        scheme = _PRETOKENIZERS.get(encoding.name)
        if scheme is None:
            raise ValueError(f"knows no splitting rule for the encoding {encoding.name!r}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ranks.tiktoken"
            path.write_bytes(
                b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items())
            )
            return gigatoken.Tokenizer.from_tiktoken(
                path, pretokenizer=scheme, special_tokens=dict(specials) if parse else {}
            )

    return _Reference(
        backend="tiktoken",
        encode=encode,
        decode=encoding.decode,
        prefix=(),
        suffix=() if eos_id is None else (eos_id,),
        eos_id=eos_id,
        vocab_size=encoding.n_vocab,
        contents=contents.hexdigest(),
        gigatoken=fast,
    )


def _encoding_named(name: str) -> tiktoken.Encoding:
    if name not in tiktoken.list_encoding_names():
        raise TokenizerError(
            f"tokenizer {name!r}: no such folder or file, nor a tiktoken encoding; those are "
            f"{', '.join(tiktoken.list_encoding_names())}"
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # requests' errors are OSErrors
        raise TokenizerError(
            f"tokenizer {name!r}: tiktoken could not fetch it ({error}); without a network, give "
            "the path of its rank file"
        ) from error


def _rank_file(config: TokenizerConfig) -> tiktoken.Encoding:
    name = config.encoding or Path(config.path).name.removesuffix(".tiktoken")
    from tiktoken_ext import openai_public

    if name not in openai_public.ENCODING_CONSTRUCTORS:
        raise TokenizerError(
            f"tokenizer {config.path!r}: which encoding's splitting rule does this rank file "
            f"follow? set zephon.tokenizer.encoding to one of "
            f"{', '.join(openai_public.ENCODING_CONSTRUCTORS)}"
        )
    try:
        ranks = {
            base64.b64decode(token, validate=True): int(rank)
            for token, rank in map(bytes.split, Path(config.path).read_bytes().splitlines())
        }
    except ValueError as error:
        raise TokenizerError(
            f"tokenizer {config.path!r}: not a rank file; each line must be a base64 token and its "
            f"rank ({error})"
        ) from error
    # The package builds an encoding from its name and downloads the ranks on the way; given the
    # file's ranks in their place it tells the splitting rule and special tokens offline.
    with (
        mock.patch.object(openai_public, "load_tiktoken_bpe", return_value=ranks),
        mock.patch.object(openai_public, "data_gym_to_mergeable_bpe_ranks", return_value=ranks),
    ):
        arguments = openai_public.ENCODING_CONSTRUCTORS[name]()
    arguments.pop("explicit_n_vocab", None)
    taken = set(ranks.values())
    top = max(taken, default=-1)
    # A vocabulary of another size than the published one has its special tokens behind the ranks.
    if any(i in taken for i in arguments["special_tokens"].values()):
        arguments["special_tokens"] = {
            t: top + 1 + i for i, t in enumerate(arguments["special_tokens"])
        }
    return tiktoken.Encoding(**arguments)


# -- gigatoken -----------------------------------------------------------------------------------


class _Gigatoken:
    """gigatoken's encode, on an instance that is renewed when its word cache has grown too far."""

    def __init__(self, make: Callable[[], gigatoken.Tokenizer]):
        self._make = make
        self._renew()

    def _renew(self) -> None:
        self._tokenizer: gigatoken.Tokenizer | None = None  # let go of the old before the new
        self._tokenizer = self._make()
        self._text = 0
        self._resident = _resident_bytes()

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._text > _RENEW_CHECK:
            if _resident_bytes() - self._resident > _RENEW_GROWTH:
                self._renew()
            self._text = 0
        self._text += sum(map(len, texts))
        assert self._tokenizer is not None
        layout = self._tokenizer.encode_batch(texts, parallel=False).layout
        bounds = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[bounds[0] : bounds[-1]].view(np.int32)
        return ids, bounds - bounds[0]


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        # No figure on this system: every check then renews, which costs a few percent of speed.
        return 0


def _checked_gigatoken(reference: _Reference, texts: list[str]) -> tuple[Encode | None, str]:
    try:
        fast = _Gigatoken(reference.gigatoken)
        for text in texts:
            got, want = fast([text])[0], reference.encode([text])[0]
            if not np.array_equal(got, want):
                return None, f"gives other ids for {text[:60]!r}"
    except Exception as error:  # whatever a young library raises, the reference can do the work
        return None, f"cannot load this tokenizer ({error})"
    return fast, ""
