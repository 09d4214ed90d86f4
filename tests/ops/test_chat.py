"""Chat: conversations become documents, of which the assistant's part is trained on."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.toys import byte_symbols
from torchtitan_zephon.ops.chat import ChatEncoder
from torchtitan_zephon.ops.chat_template import ChatError
from torchtitan_zephon.ops.documents import IGNORE_LABEL
from torchtitan_zephon.ops.references import TokenizerError
from torchtitan_zephon.ops.tokenize import load_tokenizer
from torchtitan_zephon.recipe import ChatConfig, TokenizerConfig
from torchtitan_zephon.settings import read_table

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
PLAIN = """{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}
"""
# As Qwen3 does, the last answer has an empty thought in front that earlier answers lack.
THINKING = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if loop.last and message.role == 'assistant' %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
"""
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"]
LLAMA3_TOKENS += ["<|end_header_id|>", "<|eot_id|>"]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words, and whitespace that could be one token across the end of a header.
MERGES = ["h e", "l l", "he ll", "hell o", "Ċ Ċ", "ĊĊ ĊĊ", "Ġ Ġ", "Ġ h", "Ġ a", "a s", "Ã ©", "y e"]
# How Llama 3 splits texts: newlines stay together whatever follows, as they do not in GPT-2.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def as_inputs(tokens: np.ndarray) -> np.ndarray:
    """Token ids, whether they are loss targets or not."""
    return np.where(tokens < 0, ~tokens, tokens)


def chat_folder(
    folder: Path,
    template: Any,
    tokens: list[str],
    *,
    bos: str | None = None,
    eos: str | None = None,
    adds_bos: bool = False,
    split: str = "",
    **settings: Any,
) -> Path:
    """A byte-level BPE with some merges, special ``tokens`` and a chat template."""
    vocab = {symbol: byte for byte, symbol in byte_symbols().items()}
    pairs: list[tuple[str, str]] = []
    for left, right in map(str.split, MERGES):
        pairs.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in tokens])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": bos, "eos_token": eos, "chat_template": template} | settings
    named = {k: v for k, v in named.items() if v is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    return folder


def llama3(folder: Path, template: Any = LLAMA3, **changed: Any) -> Path:
    named = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "split": LLAMA3_SPLIT}
    changed = {**named, **changed}
    return chat_folder(folder, template, LLAMA3_TOKENS, **changed)


def chatml(folder: Path, template: Any = CHATML, **changed: Any) -> Path:
    changed = {"eos": "<|im_end|>", **changed}
    return chat_folder(folder, template, CHATML_TOKENS, **changed)


def encoder(
    folder: Path, special_tokens: Any = "text", backend: str = "auto", **config
) -> ChatEncoder:
    settings = TokenizerConfig(path=str(folder), special_tokens=special_tokens)
    tokenizer = load_tokenizer(settings, backend)
    return ChatEncoder(ChatConfig(**config), tokenizer, folder)


def chat(*contents: Any, first: str = "user") -> dict[str, Any]:
    """A conversation of user and assistant by turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"messages": messages}


def documents(chats: ChatEncoder, records: list[dict[str, Any]]) -> list[np.ndarray]:
    ids, bounds = chats.encode(records)
    assert (ids.dtype, bounds.dtype) == (np.int32, np.int64)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(ids), len(records) + 1)
    return [ids[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def shown(folder: Path, tokens: np.ndarray) -> str:
    """The text of a document, loss targets between brackets."""
    decode = Tokenizer.from_file(str(folder / "tokenizer.json"))
    symbols = {symbol: chr(byte) for byte, symbol in byte_symbols().items()}
    out = ""
    for before, token in zip([-1, *tokens.tolist()], tokens.tolist(), strict=False):
        out += "[" if before < 0 <= token else "]" if token < 0 <= before else ""
        text = decode.id_to_token(max(token, ~token)) or "?"
        special = text in (*LLAMA3_TOKENS, *CHATML_TOKENS, "<think>", "</think>")
        out += text if special else "".join(symbols[c] for c in text)
    return out + "]" * bool(tokens[-1] >= 0)


def only(folder: Path, record: dict[str, Any], **config) -> str:
    (document,) = documents(encoder(folder, **config), [record])
    return shown(folder, document)


def refusal(folder: Path, *records: Any, **config) -> str:
    """The error of the last record, behind good ones."""
    with pytest.raises(ChatError) as caught:
        encoder(folder, **config).encode(list(records))
    assert caught.value.index == len(records) - 1
    return str(caught.value)


# -- what is trained on ----------------------------------------------------------------------------


def test_the_answer_and_the_end_of_its_turn_are_trained_on(tmp_path):
    assert only(llama3(tmp_path), chat("hi", "hello")) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[hello<|eot_id|>]"
    )


def test_every_answer_of_a_long_conversation_is_trained_on_and_no_header_is(tmp_path):
    record = chat("hi", "hello", "and?", "bye")
    record["messages"].insert(0, {"role": "system", "content": "be kind"})
    assert only(chatml(tmp_path), record) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[hello<|im_end|>]\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[bye<|im_end|>]"
    )


def test_ids_and_masks_of_one_token_a_byte(tmp_path):
    folder = chat_folder(tmp_path, PLAIN, ["<b>", "<e>"], bos="<b>", eos="<e>")
    (document,) = documents(encoder(folder), [chat("U", "V")])
    bos, eos = 268, 269
    user, assistant = [*b"user: U\n"], [*b"assistant: "]
    # "as" of "assistant" is the token 265.
    header = [~bos, *(~i for i in user), ~265, *(~i for i in assistant[2:])]
    assert document.tolist() == [*header, ord("V"), eos]


def test_an_eos_that_the_template_lacks_is_added_and_trained_on(tmp_path):
    assert only(chatml(tmp_path, eos="<|endoftext|>"), chat("a", "b")) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|><|endoftext|>]"
    )


def test_a_conversation_that_ends_with_the_user_trains_on_nothing_behind_the_answer(tmp_path):
    assert only(chatml(tmp_path, eos="<|endoftext|>"), chat("a", "b", "c")) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|><|endoftext|>"
    )


def test_loss_on_all_masks_nothing(tmp_path):
    folder = llama3(tmp_path)
    (document,) = documents(encoder(folder, loss_on="all"), [chat("hi")])
    assert (document >= 0).all()
    assert shown(folder, document) == (
        "[<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>]"
    )


def test_a_token_across_the_end_of_a_header_is_not_trained_on(tmp_path):
    # The newline of the header and the first of the answer are one token.
    assert only(chatml(tmp_path), chat("a", "\n\n\nb")) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n[\n\nb<|im_end|>]"
    )


def test_an_empty_answer_trains_on_the_end_of_its_turn(tmp_path):
    assert only(chatml(tmp_path), chat("a", "")) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]"
    )


def test_several_records_keep_their_order_and_none_give_none(tmp_path):
    folder = chatml(tmp_path)
    records = [chat("a", "b"), chat("quotes <|im_end|>", "yes"), chat("c", "d")]
    alone = [only(folder, record) for record in records]
    assert [shown(folder, d) for d in documents(encoder(folder), records)] == alone
    assert documents(encoder(folder), []) == []


# -- TorchTitan's own ------------------------------------------------------------------------------

FOLDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama3": (llama3, {}),
    "llama3, eos not the end of a turn": (llama3, {"eos": "<|end_of_text|>"}),
    "llama3, post-processor adds bos": (llama3, {"adds_bos": True}),
    "chatml": (chatml, {}),
    "chatml, newlines kept together": (chatml, {"split": LLAMA3_SPLIT}),
    "chatml, eos not the end of a turn": (chatml, {"eos": "<|endoftext|>"}),
    "chatml, with bos": (chatml, {"bos": "<|endoftext|>"}),
    "no special tokens": (chatml, {"template": PLAIN, "eos": "<|endoftext|>"}),
}
TURNS = [
    "",
    "a",
    "hello hello",
    " hello",
    "  a \n",
    "\n",
    "\n\n\nhello\n\n",
    "\thé日\r\n",
    "<think>",
]


class Parity:
    """Our documents against TorchTitan's (input, label) pairs."""

    def __init__(self, folder: Path):
        chat_dataset = pytest.importorskip("torchtitan.hf_datasets.text_datasets").ChatDataset
        records = pytest.importorskip("datasets").Dataset.from_list([{"a": 1}])
        tokenizer = HuggingFaceTokenizer(tokenizer_path=str(folder))
        theirs = chat_dataset(records, tokenizer, lambda r: r["messages"], seq_len=1 << 30)
        self._theirs = theirs._tokenize_sample
        self._ours = [
            encoder(folder, mode, backend)
            for mode in ("text", "parse")
            for backend in ("gigatoken", "tokenizers")
        ]
        assert [ours._tokenizer.by_pieces for ours in self._ours] == [True, False] * 2

    def check(self, prompt: str, answer: str) -> None:
        record = chat(prompt, answer)
        inputs, labels = self._theirs(record)
        for ours in self._ours:
            (document,) = documents(ours, [record])
            assert as_inputs(document)[:-1].tolist() == inputs
            assert np.where(document < 0, IGNORE_LABEL, document)[1:].tolist() == labels


@pytest.fixture(scope="module", params=FOLDERS)
def parity(request, tmp_path_factory):
    make, changed = FOLDERS[request.param]
    return Parity(make(tmp_path_factory.mktemp("tokenizer"), **changed))


def test_single_turns_are_torchtitans_labels_included(parity):
    for prompt in TURNS:
        for answer in TURNS:
            parity.check(prompt, answer)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(), st.text() | st.text(alphabet="\n \thelo<|>é"))
def test_any_single_turn_is_torchtitans(parity, prompt, answer):
    # TorchTitan parses a special token's text in a message; here it stays text unless asked for.
    assume(not re.search(r"<\|\w+\|>", prompt + answer))
    parity.check(prompt, answer)


def test_no_token_of_a_header_is_trained_on_where_torchtitan_does(tmp_path):
    # TorchTitan counts the tokens of the header alone. GPT-2's "\n\n" is one token alone and two
    # before a word, so TorchTitan trains on the second of them.
    folder = llama3(tmp_path, split="")
    inputs, labels = Parity(folder)._theirs(chat("hi", "hello"))
    (document,) = documents(encoder(folder), [chat("hi", "hello")])
    assert as_inputs(document)[:-1].tolist() == inputs
    newline, hello, end = 10, 259, 272
    assert labels[-4:] == [IGNORE_LABEL, newline, hello, end]
    assert np.where(document < 0, IGNORE_LABEL, document)[-4:].tolist() == [
        IGNORE_LABEL,
        IGNORE_LABEL,
        hello,
        end,
    ]


def test_torchtitans_label_of_what_is_masked_is_ours(parity):
    losses = pytest.importorskip("torchtitan.components.loss")
    assert losses.IGNORE_INDEX == IGNORE_LABEL


# -- special tokens in messages --------------------------------------------------------------------


def test_a_message_cannot_inject_a_special_token(tmp_path):
    folder = llama3(tmp_path)
    text = "x<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nhello"
    (document,) = documents(encoder(folder), [chat(text, "no")])
    special = {name: encoder(folder)._tokenizer._whole.token_to_id(name) for name in LLAMA3_TOKENS}
    counts = {name: as_inputs(document).tolist().count(i) for name, i in special.items()}
    assert counts == {
        "<|begin_of_text|>": 1,
        "<|end_of_text|>": 0,
        "<|start_header_id|>": 2,
        "<|end_header_id|>": 2,
        "<|eot_id|>": 2,
    }
    assert shown(folder, document) == (
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[no<|eot_id|>]"
    )


def test_special_tokens_in_messages_are_parsed_where_the_user_says_so(tmp_path):
    folder = chatml(tmp_path)
    (text,) = documents(encoder(folder, "text"), [chat("a", "b<|im_end|>")])
    (parsed,) = documents(encoder(folder, "parse"), [chat("a", "b<|im_end|>")])
    end = encoder(folder)._tokenizer._whole.token_to_id("<|im_end|>")
    assert text[-12:].tolist() == [ord("b"), *b"<|im_end|>", end]
    assert parsed[-3:].tolist() == [ord("b"), end, end]


def test_a_special_token_in_parts_of_a_content_or_in_a_tool_call_is_text(tmp_path):
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    end = encoder(chatml(tmp_path / "a"))._tokenizer._whole.token_to_id("<|im_end|>")
    (document,) = documents(encoder(chatml(tmp_path / "a")), [chat(parts, "b")])
    assert as_inputs(document).tolist().count(end) == 2
    template = CHATML.replace("message.content", "(message.tool_calls | tojson)")
    folder = chatml(tmp_path / "b", template)
    calls = [{"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_end|>"]}}}]
    messages = [
        {"role": "user", "content": "", "tool_calls": []},
        {"role": "assistant", "tool_calls": calls},
    ]
    (document,) = documents(encoder(folder), [{"messages": messages}])
    assert as_inputs(document).tolist().count(end) == 2
    assert '{"<|im_end|>": ["<|im_end|>"]}' in shown(folder, document)


def test_quoting_changes_no_other_token_of_the_conversation(tmp_path):
    # Where nothing is quoted, the way for quoted special tokens gives what the others do.
    for make in (llama3, chatml):
        tokenizer = encoder(make(tmp_path / make.__name__))._tokenizer
        for prompt in TURNS:
            plain, _ = encoder(tmp_path / make.__name__)._rendered(chat(prompt, *TURNS[::-1][:3]))
            assert not plain.quoted
            texts = [plain, plain._replace(quoted=True)]
            whole, pieces = tokenizer._encode_whole(texts), tokenizer._encode_pieces(texts) or []
            assert len({tuple(e.ids.tolist()) for e in [*whole, *pieces]}) == 1
            assert len({tuple(e.counts) for e in [*whole, *pieces]}) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.lists(st.text() | st.sampled_from([*TURNS, *LLAMA3_TOKENS, *CHATML_TOKENS]), max_size=4)
        .map("".join)
        .map(lambda text: re.sub("[\ufdd0-\ufdd3]", "", text)),
        min_size=2,
        max_size=6,
    )
)
def test_both_ways_of_tokenizing_give_the_same_documents(tmp_path_factory, contents):
    for make in (llama3, chatml):
        folder = tmp_path_factory.getbasetemp() / make.__name__
        if folder not in BOTH:
            backends = ("gigatoken", "tokenizers")
            BOTH[folder] = [encoder(make(folder), backend=backend) for backend in backends]
        pieces, whole = BOTH[folder]
        records = [chat(*contents), chat(*contents[::-1]), chat(*contents[:2])]
        assert_same(documents(pieces, records), documents(whole, records))


BOTH: dict[Path, list[ChatEncoder]] = {}


def assert_same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [d.tolist() for d in got] == [d.tolist() for d in expected]


def test_a_tokenizer_that_normalizes_is_read_the_slow_way_where_it_matters(tmp_path):
    folder = chatml(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    records = [chat("e\u0301", "e\u0301 <|im_end|>"), chat("a", "b")]
    chats = encoder(folder)
    assert chats._tokenizer._encode_pieces([chats._rendered(records[0])[0]]) is None
    assert_same(
        documents(chats, records), documents(encoder(folder, backend="tokenizers"), records)
    )
    assert shown(folder, documents(chats, records)[0]).endswith("\n[Ã© <|im_end|><|im_end|>]")


def test_a_tokenizer_that_marks_the_beginning_of_a_text_does_so_once(tmp_path):
    # As in Mistral's, whose pieces between special tokens depend on where they stand.
    letters = "▁ab<s>/\n"
    model = models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "a{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<s>{% endif %}"
    config = {"eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    chats = encoder(tmp_path)
    assert not chats._tokenizer.by_pieces
    quoted, plain = documents(chats, [chat("<s>", "b a"), chat("a", "b a")])
    bos, eos = 8, 9
    assert plain.tolist() == [~0, ~1, ~bos, ~1, ~eos, ~bos, 2, 0, 1, eos]
    assert quoted.tolist() == [~0, ~1, ~bos, ~3, ~4, ~5, ~eos, ~bos, 2, 0, 1, eos]


def test_a_token_that_swallows_whitespace_does_so_beside_quoted_ones(tmp_path):
    folder = chatml(tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in whole["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_start|>"
        token["lstrip"] = token["content"] == "<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.replace("<|im_start|>", "<|im_start|>  "), "utf-8")
    chats = encoder(folder, template=str(template))
    quoted, plain = documents(chats, [chat("<|im_end|>", "b  "), chat("x", "b  ")])
    assert shown(folder, quoted).replace("<|im_end|>", "x", 1) == shown(folder, plain)
    assert shown(folder, plain) == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n[b<|im_end|><|endoftext|>]"
    )


def test_special_tokens_that_normalization_would_make_are_text(tmp_path):
    folder = chatml(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in whole["added_tokens"]:
        token["normalized"] = token["content"] == "<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    eos = {"content": "<|im_end|>", "normalized": True}
    config = {"eos_token": eos, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    wide = "＜|im_end|＞"
    end = encoder(folder)._tokenizer._whole.token_to_id("<|im_end|>")
    (text,) = documents(encoder(folder), [chat(wide, "b")])
    (parsed,) = documents(encoder(folder, "parse"), [chat(wide, "b")])
    assert as_inputs(text).tolist().count(end) == 2
    assert as_inputs(parsed).tolist().count(end) == 3


def test_tokens_that_are_added_but_not_special_are_tokens_in_messages(tmp_path):
    folder = chatml(
        tmp_path, added_tokens_decoder={"271": {"content": "<think>", "special": False}}
    )
    think = encoder(folder)._tokenizer._whole.token_to_id("<think>")
    for answer in ("<think>a", "<think>a<|im_end|>"):
        (document,) = documents(encoder(folder), [chat("q", answer)])
        assert document.tolist().count(think) == 1


def test_characters_that_unicode_forbids_are_refused_only_beside_quoted_tokens(tmp_path):
    folder = chatml(tmp_path)
    fine = chat("\ufdd0\ufdd1", "b")
    assert "[b<|im_end|>]" in only(folder, fine)
    assert "U+FDD0 to U+FDD3" in refusal(folder, fine, chat("\ufdd0<|im_end|>", "b"))


# -- templates -------------------------------------------------------------------------------------


def test_a_template_file_comes_before_the_folders_and_its_jinja_file_before_its_config(tmp_path):
    folder = chatml(tmp_path, "{{ 'config' }}")
    assert "config" in only(folder, chat("a"), loss_on="all")
    (folder / "chat_template.jinja").write_text("{{ 'folder é' }}", "utf-8")
    assert "folder" in only(folder, chat("a"), loss_on="all")
    (tmp_path / "own.jinja").write_text("{{ 'own' }}", "utf-8")
    assert "own" in only(folder, chat("a"), loss_on="all", template=str(tmp_path / "own.jinja"))


def test_of_several_templates_the_default_is_taken(tmp_path):
    several: Any = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
    assert "[b<|im_end|>]" in only(chatml(tmp_path, several), chat("a", "b"))


def test_named_tokens_and_variables_reach_the_template(tmp_path):
    template = "{{ bos_token }}{{ greeting }}{{ eos_token }}"
    folder = llama3(tmp_path, template)
    assert only(folder, chat("a"), loss_on="all", variables={"greeting": "hello"}) == (
        "[<|begin_of_text|>hello<|eot_id|>]"
    )


def test_the_date_is_what_the_user_says_or_there_is_none(tmp_path):
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}-{% endif %}"
    folder = chatml(tmp_path / "a", guarded)
    assert only(folder, chat("a"), loss_on="all") == "[-<|im_end|>]"
    assert only(folder, chat("a"), loss_on="all", date="2026-01-31") == "[31 Jan 2026<|im_end|>]"
    folder = chatml(tmp_path / "b", "{{ strftime_now('%Y') }}")
    assert "set zephon.chat.date" in refusal(folder, chat("a"), loss_on="all")


def test_a_template_has_no_randomness_and_no_way_out(tmp_path):
    for i, source in enumerate(
        ["{{ lipsum() }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
    ):
        folder = chatml(tmp_path / str(i), source)
        assert "fails on 1 messages" in refusal(folder, chat("a"), loss_on="all")
    with pytest.raises(TokenizerError, match="random"):
        encoder(chatml(tmp_path / "c", "{{ messages | random }}"))


def test_a_template_that_renders_turns_otherwise_when_more_follow_is_refused(tmp_path):
    folder = chatml(tmp_path, THINKING)
    assert only(folder, chat("a", "b")).endswith(
        "<|im_start|>assistant\n[<think>\n\n</think>\n\nb<|im_end|>]"
    )
    message = refusal(folder, chat("a", "b"), chat("a", "b", "c", "d"))
    assert "tokenizer_config.json: the assistant's turn, message 1, cannot be found" in message
    assert "'<think>\\n\\n</think>\\n\\nb<|im_end|>\\n', not 'b<|im_end|>\\n<|im_start|>" in message
    assert "put {% generation %} and {% endgeneration %} around what the assistant" in message


def test_a_header_that_is_not_the_one_of_the_answer_is_refused(tmp_path):
    template = CHATML.replace("assistant\n", "assistant\n<think>")
    message = refusal(chatml(tmp_path, template), chat("a", "b"))
    assert "messages before it with add_generation_prompt not as they stand" in message


def test_generation_blocks_say_what_the_assistant_writes(tmp_path):
    folder = chatml(tmp_path, MARKED)
    record = chat("a", "b", "c", "d")
    assert only(folder, record) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\n\n</think>\n\nd<|im_end|>]"
    )
    assert only(folder, record, loss_on="all").count("[") == 1
    record["messages"][2]["content"] = "<|im_end|>"
    assert only(folder, record).count("[") == 2
    folder = chatml(tmp_path / "b", MARKED.replace("role == 'assistant'", "role == 'tool'"))
    assert "mark nothing" in refusal(folder, chat("a", "b"))


def test_what_a_template_refuses_is_told_in_its_words(tmp_path):
    folder = chatml(tmp_path, "{{ raise_exception('roles must alternate') }}")
    message = refusal(folder, chat("a", "b"))
    assert "tokenizer_config.json fails on 2 messages: roles must alternate" in message
    folder = chatml(tmp_path / "b", "{{ messages[0].role }}: {{ messages[-1].content }}")
    message = refusal(folder, chat("a", "b", first="assistant"))
    assert "fails on 0 messages" in message
    assert "put another turn before that" in message


def test_a_template_that_is_missing_or_broken_is_refused_at_once(tmp_path):
    with pytest.raises(TokenizerError, match="no chat template.*set zephon.chat.template"):
        encoder(chatml(tmp_path / "a", None))
    with pytest.raises(TokenizerError, match="none.jinja"):
        encoder(chatml(tmp_path / "a"), template=str(tmp_path / "none.jinja"))
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json, line 2: .*endfor"):
        encoder(chatml(tmp_path / "b", "x\n{% endfor %}"))


def test_a_tokenizer_without_eos_or_folder_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="needs an EOS token"):
        encoder(chatml(tmp_path, eos=None))
    tokenizer = load_tokenizer(TokenizerConfig(path=str(chatml(tmp_path))))
    with pytest.raises(TokenizerError, match="Hugging Face tokenizer folder"):
        ChatEncoder(ChatConfig(), tokenizer, tmp_path / "cl100k.tiktoken")


# -- records ---------------------------------------------------------------------------------------


def test_prompt_and_response_are_a_single_turn(tmp_path):
    folder = chatml(tmp_path)
    record = {"question": "a", "answer": "b"}
    assert only(folder, record, prompt_field="question", response_field="answer") == (
        only(folder, chat("a", "b"))
    )
    message = refusal(folder, {"question": "a"}, prompt_field="question", response_field="answer")
    assert message == "the record has no 'answer'; it has 'question'"


def test_a_content_in_parts_is_joined(tmp_path):
    folder = chatml(tmp_path)
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert only(folder, chat(parts, parts)) == only(folder, chat("hello", "hello"))


def test_other_keys_of_a_message_reach_the_template(tmp_path):
    folder = chatml(tmp_path, CHATML.replace("message.role +", "message.role + message.name +"))
    record = chat("a", "b")
    for message in record["messages"]:
        message["name"] = "=N"
    assert "user=N\na<|im_end|>" in only(folder, record, loss_on="all")


def test_a_null_key_of_a_message_is_no_key(tmp_path):
    folder = chatml(tmp_path, "{% for m in messages %}{{ m | list | join(' ') }};{% endfor %}")
    record = chat("a", "b")
    record["messages"][0] |= {"tool_calls": None, "name": None}
    assert only(folder, record, loss_on="all") == "[role content;role content;<|im_end|>]"


BAD = {
    "a list": ([], "the record is a list, not an object"),
    "no messages": ({"text": "a", "id": 1}, "the record has no 'messages'; it has 'text', 'id'"),
    "nothing": ({}, "the record has no 'messages'; it has nothing"),
    "null": ({"messages": None}, "messages is missing or null, not a list"),
    "a string": ({"messages": "a"}, "messages is a string, not a list"),
    "empty": ({"messages": []}, "messages is empty"),
    "a message that is none": ({"messages": ["a"]}, "messages[0] is a string, not an object"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0] has no role; roles are system, "),
    "another role": (
        {"messages": [{"role": "human", "content": "a"}]},
        "messages[0] has the role 'human'; roles are system, developer, user, assistant, tool",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content is missing or null, not"),
    "a number": (chat(1, "b"), "messages[0].content is a number, not a string"),
    "an answer of null": (chat("a", None), "messages[1].content is missing or null, not a string"),
    "an image": (
        chat([{"type": "text", "text": "a"}, {"type": "image_url"}], "b"),
        "messages[0].content[1] is of type 'image_url'; only 'text' can be trained on",
    ),
    "a part that is none": (chat(["a"], "b"), "messages[0].content[0] is a string, not an object"),
    "a part without text": (
        chat([{"type": "text"}], "b"),
        "messages[0].content[0].text is missing or null, not a string",
    ),
    "no answer": (chat("a"), "the conversation has no assistant turn, so nothing in it is trained"),
    "a lone surrogate": (
        chat("\ud800", "b"),
        "a message is no valid Unicode: surrogates not allow",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_is_refused_by_its_index_and_what_is_wrong(tmp_path, kind):
    record, expected = BAD[kind]
    assert expected in refusal(chatml(tmp_path), chat("a", "b"), chat("c", "d"), record)


# -- settings --------------------------------------------------------------------------------------


def test_what_decides_the_tokens_is_in_the_identity(tmp_path):
    folder = chatml(tmp_path)
    (tmp_path / "same.jinja").write_text(CHATML, "utf-8")
    (tmp_path / "other.jinja").write_text(CHATML + " ", "utf-8")
    plain = encoder(folder).identity
    assert plain == {
        "messages_field": "messages",
        "prompt_field": "",
        "response_field": "",
        "template": "5a1d6c7b",
        "variables": {},
        "date": "",
        "loss_on": "assistant",
    } | {"template": plain["template"]}
    assert len(plain["template"]) == 64
    assert encoder(folder, template=str(tmp_path / "same.jinja")).identity == plain
    assert encoder(folder, template=str(tmp_path / "other.jinja")).identity != plain
    assert encoder(folder, loss_on="all").identity != plain


def test_faulty_settings_are_named():
    def faults(**config) -> list[str]:
        return list(ChatConfig(**config).faults())

    assert faults() == []
    assert faults(prompt_field="p", response_field="r", date="2026-01-31") == []
    assert faults(prompt_field="p") == [
        "response_field: missing; prompt_field and response_field come together"
    ]
    assert faults(response_field="r") == [
        "prompt_field: missing; prompt_field and response_field come together"
    ]
    assert faults(messages_field="") == ["messages_field: must not be empty"]
    assert faults(date="31.1.2026") == [
        "date = '31.1.2026': must be a date such as '2026-01-31', or empty"
    ]
    assert faults(variables={"messages": 1, "x": 2}) == [
        "variables.messages: set for each conversation, so it cannot be given here"
    ]


# -- documentation ---------------------------------------------------------------------------------


def test_the_example_of_the_documentation_is_right(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "chat.md").read_text("utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    record = next(json.loads(body) for kind, body in blocks if kind == "json")
    example = next(body for kind, body in blocks if kind == "text")
    assert only(chatml(tmp_path), record) == example.rstrip("\n")
    for body in (body for kind, body in blocks if kind == "toml"):
        table = tomli.loads(body)["zephon"]["chat"]
        faults: list[str] = []
        read_table(ChatConfig, table, "zephon.chat", faults)
        assert faults == []
