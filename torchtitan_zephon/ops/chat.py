"""Chat, the worker that turns conversations into documents of which only a part is trained on.

A conversation is rendered by the tokenizer's chat template and tokenized as one text, so its ids
are those that TorchTitan's ``ChatDataset``, and inference servers, make of it. Whether a token is
a loss target is then a matter of where its first character lies. Tokenizing turn by turn would give
other ids wherever a token lies across the end of a header.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_zephon.ops.chat_template import ChatError, ChatTemplate, find_template
from torchtitan_zephon.ops.chat_tokens import ChatTokenizer, Encoded, Rendered
from torchtitan_zephon.ops.references import TokenizerError
from torchtitan_zephon.ops.tokenize import DocumentTokenizer
from torchtitan_zephon.recipe import ChatConfig

ROLES = ("system", "developer", "user", "assistant", "tool")

# Characters that chat_template and chat_tokens give a meaning.
_RESERVED = re.compile("[\ufdd0-\ufdd3]")


class ChatEncoder:
    """Conversations in, documents of token ids out.

    A document has BOS in front and EOS at its end, each only where the template has not put it
    there; newlines at the end are left out. Of single turns this makes what TorchTitan's
    ``ChatDataset`` makes of them, labels included.

    A special token's text in a message stays text, unless the tokenizer was loaded with
    ``special_tokens = "parse"``: such texts are hidden while the template's special tokens are
    found, and put back before the rest is tokenized.

    Args:
        config: the ``[zephon.chat]`` table.
        tokenizer: the run's tokenizer.
        tokenizer_folder: its Hugging Face folder.

    Raises:
        TokenizerError: a folder or template that cannot be used, or a tokenizer without EOS.
    """

    identity: dict[str, Any]
    """Fingerprint: what decides the ids and labels of a record, besides the tokenizer."""

    def __init__(self, config: ChatConfig, tokenizer: DocumentTokenizer, tokenizer_folder: Path):
        where = f"tokenizer {str(tokenizer_folder)!r}"
        if not tokenizer_folder.is_dir():
            raise TokenizerError(f"{where}: chat needs a Hugging Face tokenizer folder")
        if tokenizer.eos_id is None:
            raise TokenizerError(
                f"{where}: chat needs an EOS token; set eos_token in its tokenizer_config.json"
            )
        self._config = config
        self._bos = np.array(tokenizer.prefix, dtype=np.int32)
        self._eos = np.array([tokenizer.eos_id], dtype=np.int32)
        self._parse_messages = tokenizer.special_tokens == "parse"
        self._tokenizer = ChatTokenizer(tokenizer, tokenizer_folder)
        source, name = find_template(config.template, tokenizer_folder, self._tokenizer.settings)
        variables = self._tokenizer.named | config.variables
        self._template = ChatTemplate(source, name, variables, config.date)
        self.identity = dataclasses.asdict(config) | {"template": self._template.digest}

    def encode(self, records: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all conversations in a row, and their bounds.

        Returns:
            ids, int32 [N], complements ``~id`` of tokens that are no loss targets; bounds, int64
            [len(records) + 1].

        Raises:
            ChatError: the first record that is no conversation, or cannot be rendered; its
                ``index`` says which.
        """
        texts, answered = [], []
        for index, record in enumerate(records):
            try:
                text, last = self._rendered(record)
            except ChatError as error:
                error.index = index
                raise
            texts.append(text)
            answered.append(last)
        documents = [
            self._document(encoded, last)
            for encoded, last in zip(self._tokenizer.encode(texts), answered, strict=True)
        ]
        bounds = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum([len(d) for d in documents], out=bounds[1:])
        return np.concatenate([np.empty(0, dtype=np.int32), *documents]), bounds

    def _rendered(self, record: Any) -> tuple[Rendered, bool]:
        """The text, with the bounds of what is trained on, and whether the last turn is."""
        messages = _messages(record, self._config)
        everything = self._config.loss_on == "all"
        if not everything and all(m["role"] != "assistant" for m in messages):
            raise ChatError(
                "the conversation has no assistant turn, so nothing in it is trained on; remove "
                "the record, or set zephon.chat.loss_on = 'all'"
            )
        quoted = not self._parse_messages and any(map(self._tokenizer.quotes, _strings(messages)))
        if (quoted or self._template.marks_turns) and any(
            map(_RESERVED.search, _strings(messages))
        ):
            raise ChatError(
                "a message holds one of U+FDD0 to U+FDD3, which are no characters and are used "
                "here to tell the template's text from the messages'; remove them"
            )
        if quoted:
            messages = self._tokenizer.quote(messages)
        if everything:
            text = self._template.text(messages)
            spans = []
        else:
            text, spans = self._template.turns(messages)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ChatError(f"a message is no valid Unicode: {error.reason}") from error
        # As TorchTitan does it at the end of the text; a newline between turns is likewise nothing
        # that a model has to write.
        ends = [(a, a + len(text[a:b].rstrip("\n"))) for a, b in spans]
        boundaries = [boundary for span in ends for boundary in span]
        answered = everything or messages[-1]["role"] == "assistant"
        return Rendered(text.rstrip("\n"), boundaries, quoted), answered

    def _document(self, encoded: Encoded, answered: bool) -> np.ndarray:
        ids, counts = encoded
        begins = len(ids) >= len(self._bos) and bool((ids[: len(self._bos)] == self._bos).all())
        before = self._bos[: 0 if begins else None]
        behind = self._eos[: 0 if np.array_equal(ids[-1:], self._eos) else None]
        if self._config.loss_on == "all":
            return np.concatenate([before, ids, behind])
        tokens = ~ids
        for first, stop in zip(counts[::2], counts[1::2], strict=True):
            tokens[first:stop] = ids[first:stop]
        return np.concatenate([~before, tokens, behind if answered else ~behind])


# -- records -------------------------------------------------------------------------------------


def _messages(record: Any, config: ChatConfig) -> list[dict[str, Any]]:
    """The messages of a record, each content as one string."""
    if not isinstance(record, dict):
        raise ChatError(f"the record is {_kind(record)}, not an object")
    if config.prompt_field:
        fields = {"user": config.prompt_field, "assistant": config.response_field}
        return [
            {"role": role, "content": _text(_value(record, name), name)}
            for role, name in fields.items()
        ]
    name = config.messages_field
    messages = _value(record, name)
    if not isinstance(messages, list):
        raise ChatError(f"{name} is {_kind(messages)}, not a list")
    if not messages:
        raise ChatError(f"{name} is empty")
    return [_message(m, f"{name}[{i}]") for i, m in enumerate(messages)]


def _value(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ChatError(
            f"the record has no {name!r}; it has {', '.join(map(repr, record)) or 'nothing'}"
        )
    return record[name]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ChatError(f"{where} is {_kind(message)}, not an object")
    role = message.get("role")
    if role not in ROLES:
        said = "has no role" if role is None else f"has the role {role!r}"
        raise ChatError(f"{where} {said}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    # A Parquet row has every key that any has; a template may ask whether a key is there.
    message = {k: v for k, v in message.items() if v is not None or k == "content"}
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message  # a turn that only calls tools
    return {**message, "content": _text(content, f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise ChatError(f"{where} is {_kind(content)}, not a string")
    return content


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise ChatError(f"{where} is {_kind(part)}, not an object")
    if part.get("type") != "text":
        raise ChatError(f"{where} is of type {part.get('type')!r}; only 'text' can be trained on")
    if not isinstance(part.get("text"), str):
        raise ChatError(f"{where}.text is {_kind(part.get('text'))}, not a string")
    return part["text"]


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "missing or null",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), f"of type {type(value).__name__}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
