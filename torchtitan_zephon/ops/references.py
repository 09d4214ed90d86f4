"""Reference tokenizers: Hugging Face folders through ``tokenizers``, and tiktoken's encodings."""

import base64
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import gigatoken
import msgspec
import numpy as np
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from torchtitan_zephon.recipe import TokenizerConfig


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or a backend that cannot stand in for it."""


Ids = tuple[int, ...]


class Encode(Protocol):
    """Texts to token ids, without what is put around a document unless it is given."""

    def __call__(
        self, texts: list[str], prefix: Ids = (), suffix: Ids = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts in a row, each between ``prefix`` and ``suffix``: int32 [N]; and their
        bounds, int64 [len(texts) + 1]."""
        ...


@dataclass(frozen=True)
class Reference:
    """A tokenizer as its own library runs it, and how to make gigatoken's version of it."""

    backend: str
    encode: Encode
    decode: Callable[[list[int]], str]
    prefix: Ids
    suffix: Ids
    eos_id: int | None
    vocab_size: int
    contents: str
    gigatoken: Callable[[], gigatoken.Tokenizer]


def load_reference(config: TokenizerConfig) -> Reference:
    """The tokenizer that a recipe names, as its own library runs it.

    Raises:
        TokenizerError: there is none, or it cannot be read.
    """
    if not config.path:
        raise TokenizerError("path: missing, and TorchTitan's hf_assets_path is not set either")
    parse = config.special_tokens == "parse"
    path = Path(config.path)
    return _hugging_face(path, parse) if path.is_dir() else _tiktoken(config, parse)


def _from_lists(rows: list[list[int]], prefix: Ids, suffix: Ids) -> tuple[np.ndarray, np.ndarray]:
    bounds = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(prefix) + len(r) + len(suffix) for r in rows], out=bounds[1:])
    each = chain.from_iterable(chain(prefix, row, suffix) for row in rows)
    return np.fromiter(each, dtype=np.int32, count=int(bounds[-1])), bounds


# -- Hugging Face folders ------------------------------------------------------------------------

NAMED_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


def _hugging_face(folder: Path, parse: bool) -> Reference:
    tokenizer = read_folder(folder)
    tokenizer.no_truncation()  # a limit meant for inference must not cut training documents
    tokenizer.no_padding()
    config = folder / "tokenizer_config.json"
    try:
        settings = json.loads(config.read_text("utf-8")) if config.exists() else {}
        named = {name: settings.get(f"{name}_token") for name in NAMED_TOKENS}
        listed = [added_token(t) for t in settings.get("added_tokens_decoder", {}).values()]
        tokenizer.add_special_tokens(
            [added_token(t) for t in named.values() if t is not None]
            + [t for t in listed if t.special]
        )
        # Not as special ones, which Qwen's <think> and the like would become: they are always text
        # of their own kind, and parsed.
        tokenizer.add_tokens([t for t in listed if not t.special])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{config}: {error!r}") from error
    bos_id, eos_id = (
        None if named[n] is None else tokenizer.token_to_id(token_text(named[n]))
        for n in ("bos", "eos")
    )
    # What the tokenizer's own post-processing puts around a text; BOS and EOS join it only where
    # it does not add them itself.
    own = tokenizer.encode("").ids
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    lead = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    if lead is None or not plain:
        raise TokenizerError(
            f"tokenizer {str(folder)!r}: its post-processing changes a text's own tokens"
        )
    prefix, suffix = whole[:lead], whole[lead + len(plain) :]
    if bos_id is not None and bos_id not in own:
        prefix = [bos_id, *prefix]
    if eos_id is not None and eos_id not in own:
        suffix = [*suffix, eos_id]
    # Raw: vocabulary and merges, half a million objects at times, go on as they stand.
    serialized = msgspec.json.decode(tokenizer.to_str(), type=dict[str, msgspec.Raw])
    tokenizer.encode_special_tokens = not parse
    serialized["post_processor"] = msgspec.Raw(b"null")
    if not parse:
        added = msgspec.json.decode(serialized["added_tokens"])
        plain_ones = msgspec.json.encode([t for t in added if not t["special"]])
        serialized["added_tokens"] = msgspec.Raw(plain_ones)

    def encode(
        texts: list[str], prefix: Ids = (), suffix: Ids = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        batch = tokenizer.encode_batch(texts, add_special_tokens=False)
        return _from_lists([e.ids for e in batch], prefix, suffix)

    return Reference(
        backend="tokenizers",
        encode=encode,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        eos_id=eos_id,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,  # ids may have gaps
        contents=_files_digest(folder),
        gigatoken=lambda: gigatoken.Tokenizer.from_json(msgspec.json.encode(serialized)),
    )


_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")


def _files_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        if (folder / name).exists():
            data = (folder / name).read_bytes()
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def read_folder(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{folder / 'tokenizer.json'}: {error}") from error
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        try:
            model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        except Exception as error:
            raise TokenizerError(f"{folder / 'vocab.json'} and merges.txt: {error}") from error
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    raise TokenizerError(
        f"tokenizer {str(folder)!r}: the folder has neither tokenizer.json nor vocab.json with "
        "merges.txt"
    )


def token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def added_token(token: Any) -> AddedToken:
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


def _tiktoken(config: TokenizerConfig, parse: bool) -> Reference:
    encoding = _rank_file(config) if Path(config.path).is_file() else _encoding_named(config.path)
    eos_id = encoding._special_tokens.get("<|endoftext|>")
    ranks, specials = encoding._mergeable_ranks, encoding._special_tokens
    contents = hashlib.sha256()
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        contents.update(b"%d %s\n" % (rank, base64.b64encode(token)))
    contents.update(json.dumps([encoding._pat_str, sorted(specials.items())]).encode())

    def encode(
        texts: list[str], prefix: Ids = (), suffix: Ids = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        if parse:
            rows = [encoding.encode(t, allowed_special="all") for t in texts]
        else:
            rows = [encoding.encode_ordinary(t) for t in texts]
        return _from_lists(rows, prefix, suffix)

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

    return Reference(
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
        if len(set(ranks.values())) < len(ranks):
            raise ValueError("some rank is given twice")
        if not all(bytes([b]) in ranks for b in range(256)):
            raise ValueError("not every single byte has a rank")
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
        arguments: dict[str, Any] = openai_public.ENCODING_CONSTRUCTORS[name]()
    arguments.pop("explicit_n_vocab", None)
    taken = set(ranks.values())
    top = max(taken, default=-1)
    # A vocabulary of another size than the published one has its special tokens behind the ranks.
    if any(i in taken for i in arguments["special_tokens"].values()):
        arguments["special_tokens"] = {
            t: top + 1 + i for i, t in enumerate(arguments["special_tokens"])
        }
    return tiktoken.Encoding(**arguments)
