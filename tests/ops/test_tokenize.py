"""Tokenizing: the ids of the user's own tokenizer, whichever library gives them."""

import base64
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.toys import BOS, EOS, byte_ids, byte_symbols, byte_tokenizer
from torchtitan_zephon.ops import tokenize
from torchtitan_zephon.ops.tokenize import PROBE, DocumentTokenizer, TokenizerError, load_tokenizer
from torchtitan_zephon.recipe import TokenizerConfig

TEXTS = ["", "a", "hello  wörld\n", f"a{EOS}b {BOS}", "It's 12345 o'clock\r\n\t😀", *PROBE]
MERGES = [
    b"he",
    b"ll",
    b" w",
    b"hell",
    b"12",
    "é".encode(),
    b"  ",
    b"or",
    b"\xe6\x97",
    b"\xe6\x97\xa5",
]
RANKS = [*(bytes([b]) for b in range(256)), *MERGES]


def load(path: object, backend: str = "auto", **changed) -> DocumentTokenizer:
    return load_tokenizer(TokenizerConfig(path=str(path), **changed), backend)


def documents(tokenizer: DocumentTokenizer, texts: list[str]) -> list[list[int]]:
    ids, bounds = tokenizer.encode(texts)
    assert (ids.dtype, bounds.dtype) == (np.int32, np.int64)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(ids), len(texts) + 1)
    return [ids[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def refusal(path: object, backend: str = "auto", **changed) -> str:
    with pytest.raises(TokenizerError) as caught:
        load(path, backend, **changed)
    return str(caught.value)


def merged_tokenizer(folder: Path, **files: object) -> Path:
    """A byte-level BPE with some merges; ``files`` replace parts of its two JSON files."""
    byte_tokenizer(folder)
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    symbols = byte_symbols()
    for left, right in [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b"1", b"2"), (b" ", b"w")]:
        pair = ["".join(symbols[b] for b in part) for part in (left, right)]
        whole["model"]["merges"].append(pair)
        whole["model"]["vocab"]["".join(pair)] = len(whole["model"]["vocab"])
    whole |= {k: v for k, v in files.items() if k != "config"}
    (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    if "config" in files:
        (folder / "tokenizer_config.json").write_text(json.dumps(files["config"]), "utf-8")
    return folder


def rank_file(path: Path, ranks: list[bytes] = RANKS) -> Path:
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    return path


# -- documents of a Hugging Face folder ------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
@pytest.mark.parametrize(
    ("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_document_is_bos_then_its_tokens_then_eos(tmp_path, backend, bos, eos):
    tokenizer = load(byte_tokenizer(tmp_path, bos=bos, eos=eos), backend)
    assert tokenizer.backend == backend
    assert (tokenizer.prefix, tokenizer.suffix) == ((0,) * bos, (1,) * eos)
    assert tokenizer.eos_id == (1 if eos else None)
    assert tokenizer.vocab_size == 258
    assert documents(tokenizer, []) == []
    assert documents(tokenizer, ["", "ab", "ß"]) == [
        [0] * bos + [] + [1] * eos,
        [0] * bos + [99, 100] + [1] * eos,
        [0] * bos + [197, 161] + [1] * eos,
    ]
    assert documents(tokenizer, TEXTS[:3]) == [byte_ids(t, bos=bos, eos=eos) for t in TEXTS[:3]]


def test_several_tokens_around_a_text_keep_their_order(tmp_path):
    folder = byte_tokenizer(tmp_path)
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole.post_processor = processors.TemplateProcessing(
        single=f"{EOS} {BOS} $A {BOS} {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    whole.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    assert (tokenizer.prefix, tokenizer.suffix) == ((1, 0), (0, 1))
    assert documents(tokenizer, ["", "a"]) == [[1, 0, 0, 1], [1, 0, 99, 0, 1]]


def template(single: str) -> dict:
    tokens = [(BOS, 0), (EOS, 1)]
    state = processors.TemplateProcessing(single=single, special_tokens=tokens).__getstate__()
    return json.loads(state)


DICT_EOS = {"content": EOS, "lstrip": False, "normalized": False, "rstrip": False}
DECODER = {
    "0": {"content": BOS, "special": True, "normalized": False},
    "1": {"content": EOS, "special": True, "normalized": False},
    "263": {"content": "<|new|>", "special": True, "lstrip": True},
    "264": {"content": "<tool>", "special": False},
}
FOLDERS = {
    "bos and eos in the config": {"config": {"bos_token": BOS, "eos_token": EOS}},
    "eos only": {"config": {"eos_token": EOS}},
    "tokens as tables": {"config": {"bos_token": BOS, "eos_token": DICT_EOS}},
    "a template adds bos": {
        "post_processor": template(f"{BOS} $A"),
        "config": {"bos_token": BOS, "eos_token": EOS},
    },
    "a template adds both": {
        "post_processor": template(f"{BOS} $A {EOS}"),
        "config": {"bos_token": BOS, "eos_token": EOS},
    },
    "a template and no names": {"post_processor": template(f"{BOS} $A {EOS}"), "config": {}},
    "added_tokens_decoder": {
        "config": {"bos_token": BOS, "eos_token": EOS, "added_tokens_decoder": DECODER}
    },
    "tokens that the vocabulary lacks": {
        "config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": None}
    },
}


def parity(folder: Path, texts: list[str]) -> None:
    theirs = HuggingFaceTokenizer(tokenizer_path=str(folder))
    expected = [theirs.encode(t, add_bos=True, add_eos=True) for t in texts]
    for backend in ("auto", "tokenizers"):
        ours = load(folder, backend, special_tokens="parse")
        assert documents(ours, texts) == expected
        assert (ours.eos_id, ours.vocab_size) == (theirs.eos_id, theirs.get_vocab_size())


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_parsed_documents_are_those_of_torchtitans_own_tokenizer(tmp_path, files):
    extra = ["</s><s>a", "x <|new|> y", "<tool>a</tool>", "hello 12 world hell"]
    parity(merged_tokenizer(tmp_path, **files), [*TEXTS, *extra])


def test_a_folder_without_config_is_torchtitans(tmp_path):
    folder = merged_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    parity(folder, [*TEXTS, "hello 12"])


def test_a_folder_of_vocab_and_merges_is_torchtitans(tmp_path):
    model = json.loads((merged_tokenizer(tmp_path / "m") / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "v"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    parity(folder, [*TEXTS, "hello 12"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    parity(folder, [*TEXTS, "hello 12"])


def test_a_limit_of_length_or_a_padding_for_inference_changes_no_document(tmp_path):
    limits = {
        "truncation": {
            "direction": "Right",
            "max_length": 5,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": BOS,
        },
    }
    plain = merged_tokenizer(tmp_path / "plain")
    limited = merged_tokenizer(tmp_path / "limited", **limits)
    for backend in ("tokenizers", "gigatoken"):
        assert documents(load(limited, backend), TEXTS) == documents(load(plain, backend), TEXTS)
    assert documents(load(limited), ["abcdefgh"]) == [byte_ids("abcdefgh")]


@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_a_special_tokens_text_is_text_unless_it_is_to_be_parsed(tmp_path, backend):
    folder = byte_tokenizer(tmp_path)
    text = f"a{EOS}{BOS}b"
    assert documents(load(folder, backend), [text]) == [byte_ids(text)]
    parsed = load(folder, backend, special_tokens="parse")
    assert documents(parsed, [text]) == [[0, 99, 1, 0, 100, 1]]


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.one_of(st.text(), st.sampled_from([EOS, BOS]), st.text("<|eosb>")).flatmap(
            lambda a: st.text(max_size=3).map(lambda b: b + a + b)
        )
    )
)
def test_as_text_no_document_ever_holds_a_special_tokens_id(tmp_path_factory, texts):
    tokenizer = shared(tmp_path_factory)["gigatoken text"]
    ids, _ = tokenizer.encode_plain(texts)
    assert not np.isin(ids, [0, 1]).any()


_SHARED: dict[str, DocumentTokenizer] = {}


def shared(tmp_path_factory) -> dict[str, DocumentTokenizer]:
    """Both backends in both modes, for tests that ask them many times."""
    if not _SHARED:
        folder = merged_tokenizer(tmp_path_factory.mktemp("shared"))
        ranks = rank_file(tmp_path_factory.mktemp("ranks") / "cl100k_base.tiktoken")
        for mode in ("text", "parse"):
            _SHARED[f"gigatoken {mode}"] = load(folder, "gigatoken", special_tokens=mode)
            _SHARED[f"tokenizers {mode}"] = load(folder, "tokenizers", special_tokens=mode)
            _SHARED[f"gigatoken ranks {mode}"] = load(ranks, "gigatoken", special_tokens=mode)
            _SHARED[f"tiktoken ranks {mode}"] = load(ranks, "tiktoken", special_tokens=mode)
    return _SHARED


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(
        st.one_of(
            st.text(),
            st.text("hel w12'srt\n\r\t "),
            st.lists(
                st.sampled_from(["he", EOS, "  ", "日", "\u0301", "'LL", "<|endoftext|>"])
            ).map("".join),
        )
    ),
    mode=st.sampled_from(["text", "parse"]),
)
def test_gigatoken_gives_the_references_ids_for_any_text(tmp_path_factory, texts, mode):
    backends = shared(tmp_path_factory)
    for fast, reference in [
        (backends[f"gigatoken {mode}"], backends[f"tokenizers {mode}"]),
        (backends[f"gigatoken ranks {mode}"], backends[f"tiktoken ranks {mode}"]),
    ]:
        assert documents(fast, texts) == documents(reference, texts)


@settings(deadline=None, max_examples=50)
@given(text=st.text())
def test_decode_is_the_inverse_of_encode(tmp_path_factory, text):
    for tokenizer in shared(tmp_path_factory).values():
        ids, _ = tokenizer.encode_plain([text])
        assert tokenizer.decode(ids.tolist()) == text


# -- gigatoken is not trusted ----------------------------------------------------------------------


class Liar:
    """Stands for a gigatoken that gives one wrong id for texts with an ``x``."""

    def __init__(self, make):
        self._true = Honest(make)

    def __call__(self, texts):
        ids, bounds = self._true(texts)
        return (ids + 1 if any("x" in t for t in texts) else ids), bounds


class Broken:
    def __init__(self, make):
        raise RuntimeError("a vocabulary that it cannot read")


class Panic(BaseException):
    """What a panic of Rust code becomes in Python: not an ``Exception``."""


class Panicking:
    def __init__(self, make):
        raise Panic("index out of bounds")


Honest = tokenize._Gigatoken


@pytest.mark.parametrize(
    ("fake", "fault"),
    [
        (Liar, "gives other ids for "),
        (Broken, "cannot load this tokenizer (a vocabulary that it cannot read)"),
        (Panicking, "cannot load this tokenizer (index out of bounds)"),
    ],
)
def test_a_gigatoken_that_errs_is_replaced_with_one_line_in_the_log(
    tmp_path, monkeypatch, caplog, fake, fault
):
    monkeypatch.setattr(tokenize, "_Gigatoken", fake)
    folder = byte_tokenizer(tmp_path)
    with caplog.at_level(logging.WARNING):
        tokenizer = load(folder)
    assert tokenizer.backend == "tokenizers"
    assert documents(tokenizer, ["xyz"]) == [byte_ids("xyz")]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"tokenizer {folder}: gigatoken {fault}")
    assert record.getMessage().endswith("; tokenizers does the work")


def test_a_rank_file_on_which_gigatoken_panics_is_read_by_tiktoken(tmp_path):
    ranks = [*RANKS, b"xyz"]  # "xyz" has no merge that leads to it
    tokenizer = load(rank_file(tmp_path / "gpt2.tiktoken", ranks))
    assert tokenizer.backend == "tiktoken"
    assert documents(tokenizer, ["xyz"]) == [[266, 50256]]


@pytest.mark.parametrize("fake", [Liar, Broken, Panicking])
def test_a_gigatoken_that_errs_is_an_error_when_asked_for_by_name(tmp_path, monkeypatch, fake):
    monkeypatch.setattr(tokenize, "_Gigatoken", fake)
    assert refusal(byte_tokenizer(tmp_path), "gigatoken").endswith(
        "; set zephon.runtime.tokenizer_backend to 'auto' or 'tokenizers'"
    )


def test_gigatoken_must_agree_on_the_runs_own_documents_too(tmp_path, monkeypatch):
    class LiarAboutOneDocument(Liar):
        def __call__(self, texts):
            ids, bounds = self._true(texts)
            return (ids + 1 if texts == ["a document of the run"] else ids), bounds

    monkeypatch.setattr(tokenize, "_Gigatoken", LiarAboutOneDocument)
    config = TokenizerConfig(path=str(byte_tokenizer(tmp_path)))
    assert load_tokenizer(config, "auto", ["another"]).backend == "gigatoken"
    assert load_tokenizer(config, "auto", ["a document of the run"]).backend == "tokenizers"


def test_an_agreeing_gigatoken_is_used_without_a_word(tmp_path, caplog):
    assert load(byte_tokenizer(tmp_path)).backend == "gigatoken"
    assert caplog.records == []


def test_renewing_gigatokens_instance_leaves_its_output_the_same(tmp_path, monkeypatch):
    made = []
    renew = Honest._renew
    monkeypatch.setattr(Honest, "_renew", lambda self: (made.append(self), renew(self)))
    monkeypatch.setattr(tokenize, "_RENEW_CHECK", 100)
    monkeypatch.setattr(tokenize, "_RENEW_GROWTH", -(1 << 60))
    folder = merged_tokenizer(tmp_path)
    tokenizer, reference = load(folder, "gigatoken"), load(folder, "tokenizers")
    made.clear()
    for i in range(20):
        texts = [f"hello {i} wörld" * 5, "", "hell"]
        assert documents(tokenizer, texts) == documents(reference, texts)
    assert 8 <= len(made) <= 20


def test_a_system_that_tells_no_memory_figure_renews_by_the_text(tmp_path, monkeypatch):
    made = []
    renew = Honest._renew
    monkeypatch.setattr(Honest, "_renew", lambda self: (made.append(self), renew(self)))
    monkeypatch.setattr(tokenize, "open", fail_to_open, raising=False)
    tokenizer = load(byte_tokenizer(tmp_path), "gigatoken")
    monkeypatch.setattr(tokenize, "_RENEW_CHECK", 100)
    monkeypatch.setattr(tokenize, "_RENEW_BLIND", 700)
    made.clear()
    while not made:
        tokenizer.encode(["x" * 200])
    for _ in range(8):  # with the text that was encoded after renewing, at the 4th, 800 are behind
        tokenizer.encode(["x" * 200])
    assert len(made) == 3


def fail_to_open(*args):
    raise FileNotFoundError(args)


# -- tiktoken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "eos", "backend"),
    [
        ("cl100k_base", 100257, "gigatoken"),
        ("o200k_base", 199999, "gigatoken"),
        ("gpt2", 50256, "gigatoken"),
        ("r50k_base", 50256, "gigatoken"),
        ("p50k_base", 50256, "tiktoken"),
    ],
)
def test_a_rank_file_follows_the_encoding_in_its_name(tmp_path, name, eos, backend):
    tokenizer = load(rank_file(tmp_path / f"{name}.tiktoken"))
    assert tokenizer.backend == backend
    assert (tokenizer.prefix, tokenizer.suffix, tokenizer.eos_id) == ((), (eos,), eos)
    assert documents(tokenizer, ["", "hell  12é"]) == [[eos], [259, 32, 32, 260, 261, eos]]
    reference = load(tmp_path / f"{name}.tiktoken", "tiktoken")
    assert documents(tokenizer, TEXTS) == documents(reference, TEXTS)


def test_the_splitting_rule_is_the_encodings(tmp_path):
    ranks = [*RANKS, b"1234"]
    split = load(rank_file(tmp_path / "cl100k_base.tiktoken", ranks), "tiktoken")
    whole = load(rank_file(tmp_path / "gpt2.tiktoken", ranks), "tiktoken")
    assert documents(split, ["1234"]) == [[260, 51, 52, 100257]]  # three digits at a time
    assert documents(whole, ["1234"]) == [[266, 50256]]


def test_a_rank_file_of_any_name_needs_its_encoding_named(tmp_path):
    path = rank_file(tmp_path / "mine.tiktoken")
    message = refusal(path)
    assert "set zephon.tokenizer.encoding to one of gpt2, r50k_base," in message
    assert documents(load(path, encoding="gpt2"), ["he"]) == [[256, 50256]]
    assert "set zephon.tokenizer.encoding" in refusal(path, encoding="gpt3")


def test_special_tokens_move_behind_a_larger_vocabulary(tmp_path):
    ranks = [*RANKS, *(b"\xff" + i.to_bytes(3) for i in range(50_000))]
    tokenizer = load(rank_file(tmp_path / "gpt2.tiktoken", ranks), "tiktoken")
    assert tokenizer.eos_id == len(ranks) == 50_266
    assert tokenizer.vocab_size == 50_267


@pytest.mark.parametrize("backend", ["gigatoken", "tiktoken"])
def test_the_text_of_tiktokens_end_token_is_text_unless_it_is_to_be_parsed(tmp_path, backend):
    path = rank_file(tmp_path / "cl100k_base.tiktoken")
    plain = documents(load(path, backend), ["a<|endoftext|>"])
    assert plain == [[*b"a<|endoftext|>", 100257]]
    parsed = load(path, backend, special_tokens="parse")
    assert documents(parsed, ["a<|endoftext|>"]) == [[97, 100257, 100257]]


@pytest.mark.parametrize(
    "data",
    [
        b"not base64!! 3\n",
        b"YQ== 0\nYg==\n",
        b"YQ== zero\n",
        b"\x00\xff\n",
        b"",
        b"YQ== 0\nYg== 0\n",
        b"YQ== 0\nYg== 1\n",
    ],
    ids=["no base64", "no rank", "no number", "binary", "empty", "a rank twice", "bytes missing"],
)
def test_a_broken_rank_file_is_refused(tmp_path, data):
    (tmp_path / "cl100k_base.tiktoken").write_bytes(data)
    message = refusal_or_panic(tmp_path / "cl100k_base.tiktoken")
    assert message.startswith(
        f"tokenizer '{tmp_path}/cl100k_base.tiktoken': not a rank file; each line must be"
    )


def refusal_or_panic(path: Path) -> str:
    try:
        load(path)
    except TokenizerError as error:
        return str(error)
    except BaseException as error:  # a panic in tiktoken is no Exception
        pytest.fail(f"{type(error).__name__}: {error}")
    pytest.fail("no error")


# -- what cannot be used ---------------------------------------------------------------------------


def test_what_is_neither_folder_nor_file_nor_encoding_is_refused(tmp_path):
    assert refusal("cl100k_bas").startswith(
        "tokenizer 'cl100k_bas': no such folder or file, nor a tiktoken encoding; those are gpt2,"
    )
    assert refusal(tmp_path / "none").startswith(f"tokenizer '{tmp_path}/none': no such folder")


def test_no_tokenizer_at_all_is_refused():
    assert refusal("") == "path: missing, and TorchTitan's hf_assets_path is not set either"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    assert refusal(tmp_path) == (
        f"tokenizer '{tmp_path}': the folder has neither tokenizer.json nor vocab.json with "
        "merges.txt"
    )


def test_damaged_files_of_a_folder_are_refused_by_name(tmp_path):
    folder = byte_tokenizer(tmp_path / "a")
    (folder / "tokenizer.json").write_text("{")
    assert refusal(folder).startswith(f"{folder}/tokenizer.json: ")


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token": 3}', '{"eos_token": {}}'])
def test_a_damaged_tokenizer_config_is_refused_by_name(tmp_path, text):
    folder = byte_tokenizer(tmp_path / "a")
    (folder / "tokenizer_config.json").write_text(text)
    assert "tokenizer_config.json" in refusal(folder)


def test_a_damaged_vocabulary_is_refused_by_name(tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert "vocab.json" in refusal(tmp_path)


def test_a_backend_that_cannot_read_the_tokenizer_is_refused(tmp_path):
    folder = byte_tokenizer(tmp_path / "a")
    assert refusal(folder, "tiktoken") == (
        f"tokenizer '{folder}': backend 'tiktoken' cannot read it; use 'auto', 'gigatoken' or "
        "'tokenizers'"
    )
    ranks = rank_file(tmp_path / "gpt2.tiktoken")
    assert refusal(ranks, "tokenizers").endswith("use 'auto', 'gigatoken' or 'tiktoken'")


def test_a_post_processor_that_changes_the_text_is_refused(tmp_path):
    folder = byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "its post-processing changes a text's own tokens" in refusal(folder)


# -- identity --------------------------------------------------------------------------------------


def test_the_identity_is_that_of_the_contents_and_not_of_place_or_backend(tmp_path):
    here, there = merged_tokenizer(tmp_path / "here"), merged_tokenizer(tmp_path / "there")
    assert load(here, "gigatoken").identity == load(there, "tokenizers").identity
    ranks = rank_file(tmp_path / "gpt2.tiktoken")
    moved = rank_file(tmp_path / "moved")
    assert load(ranks, "gigatoken").identity == load(moved, "tiktoken", encoding="gpt2").identity


def test_the_identity_changes_with_anything_that_may_change_a_document(tmp_path):
    config = {"bos_token": BOS, "eos_token": EOS}
    whole = merged_tokenizer(tmp_path / "0")
    vocab = json.loads((whole / "tokenizer.json").read_text())
    vocab["model"]["merges"].pop()
    identities = [
        load(whole).identity,
        load(whole, special_tokens="parse").identity,
        load(merged_tokenizer(tmp_path / "1", config={"eos_token": EOS})).identity,
        load(merged_tokenizer(tmp_path / "2", config={**config, "pad_token": "<pad>"})).identity,
        load(merged_tokenizer(tmp_path / "3", model=vocab["model"])).identity,
        load(byte_tokenizer(tmp_path / "4")).identity,
        load(rank_file(tmp_path / "gpt2.tiktoken")).identity,
        load(rank_file(tmp_path / "gpt2.tiktoken"), special_tokens="parse").identity,
        load(rank_file(tmp_path / "cl100k_base.tiktoken")).identity,
        load(rank_file(tmp_path / "gpt2.tiktoken", [*RANKS, b"ab"])).identity,
    ]
    assert len({json.dumps(i, sort_keys=True) for i in identities}) == len(identities)
