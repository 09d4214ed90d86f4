"""Chat templates: conversations to texts, and where in them the assistant speaks."""

import hashlib
import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan_zephon.ops.references import TokenizerError

# Characters that Unicode keeps out of texts ("noncharacters"), so they are free to mean something.
_OPEN, _CLOSE = "\ufdd2", "\ufdd3"  # around what a template marks as the assistant's


class ChatError(ValueError):
    """A record that cannot be made a document."""

    index = -1
    """Which of the records it is."""


class ChatTemplate:
    """A Jinja chat template, in the sandbox that transformers and TorchTitan use.

    Two things differ, so that a text depends on nothing but the conversation: what is random is
    not there, and the date is what the user says it is.

    Args:
        source: the template's text.
        name: where it is from, for errors.
        variables: what it sees besides the conversation.
        today: the date that ``strftime_now`` tells, ISO format; empty: there is no such function.

    Raises:
        TokenizerError: it is no valid template.
    """

    def __init__(self, source: str, name: str, variables: dict[str, Any], today: str = ""):
        self.name = name
        self.digest = hashlib.sha256(source.encode("utf-8")).hexdigest()
        self.marks_turns = re.search(r"\{%[-+]?\s*generation\b", source) is not None
        """Whether it has ``{% generation %}`` blocks, which say what the assistant's part is."""
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.globals.pop("lipsum")  # random, as is the filter
        environment.filters.pop("random")
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        if today:
            environment.globals["strftime_now"] = date.fromisoformat(today).strftime
        try:
            self._template: jinja2.Template = environment.from_string(source, variables)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"chat template {name}, line {error.lineno}: {error}") from error

    def text(self, messages: list[dict[str, Any]]) -> str:
        """The conversation as a text.

        Raises:
            ChatError: the template refuses it, or fails.
        """
        return _unmarked(self._render(messages))[0]

    def turns(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as a text, and the stretches of it that the assistant has to write.

        An answer begins where the rendering of the messages before it ends, with
        ``add_generation_prompt``, and ends where that of the messages up to it ends: so the text
        that ends a turn belongs to it, and its header does not. Both renderings must be beginnings
        of the whole. ``{% generation %}`` blocks, where a template has them, decide instead.

        Raises:
            ChatError: the template refuses it, or fails, or does not tell turns apart.
        """
        whole = self._render(messages)
        if self.marks_turns:
            text, spans = _unmarked(whole)
            if not spans:
                raise ChatError(
                    f"chat template {self.name}: its {{% generation %}} blocks mark nothing in "
                    "this conversation, so nothing in it is trained on"
                )
            return text, spans
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            header = self._render(messages[:i], add_generation_prompt=True)
            self._check_beginning(header, whole, i, "messages before it with add_generation_prompt")
            through = whole
            if i + 1 < len(messages):
                through = self._render(messages[: i + 1])
                self._check_beginning(through, whole, i, "messages up to it alone")
            spans.append((len(header), len(through)))
        return whole, spans

    def _render(self, messages: list[dict[str, Any]], **variables: bool) -> str:
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # whatever its expressions raise
            hint = ""
            if "strftime_now" in str(error):
                hint = "; set zephon.chat.date to the date that it shall be told"
            elif not messages:
                hint = (
                    "; what it renders for no messages would tell where the assistant's turn at "
                    "the beginning starts: put another turn before that"
                )
            raise ChatError(
                f"chat template {self.name} fails on {len(messages)} messages: {error}{hint}"
            ) from error

    def _check_beginning(self, part: str, whole: str, turn: int, what: str) -> None:
        if whole.startswith(part):
            return
        at = len(os.path.commonprefix([part, whole]))
        raise ChatError(
            f"chat template {self.name}: the assistant's turn, message {turn}, cannot be found, "
            f"for it renders the {what} not as they stand in the whole conversation: "
            f"{part[at : at + 40]!r}, not {whole[at : at + 40]!r}, follows "
            f"{whole[max(0, at - 40) : at]!r}; in a copy of the template put {{% generation %}} "
            "and {% endgeneration %} around what the assistant writes, and set "
            "zephon.chat.template to that file"
        )


def find_template(path: str, folder: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """The source of a chat template and where it is from.

    Args:
        path: the template's file; empty for the tokenizer's.
        folder: the tokenizer's.
        settings: what its ``tokenizer_config.json`` holds.

    Raises:
        TokenizerError: there is none, or it cannot be read.
    """
    file = Path(path) if path else folder / "chat_template.jinja"
    if path or file.exists():
        try:
            return file.read_text("utf-8"), str(file)
        except (OSError, UnicodeError) as error:
            raise TokenizerError(f"chat template {str(file)!r}: {error}") from error
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, each with a name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise TokenizerError(
            f"tokenizer {str(folder)!r}: no chat template, neither a chat_template.jinja nor "
            "chat_template in tokenizer_config.json; set zephon.chat.template to a Jinja file"
        )
    return source, str(folder / "tokenizer_config.json")


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``, as in transformers: the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and what was between them."""
    spans: list[tuple[int, int]] = []
    plain, length, begin = [], 0, 0
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", text):
        if piece == _OPEN:
            begin = length
        elif piece == _CLOSE:
            spans.append((begin, length))
        else:
            plain.append(piece)
            length += len(piece)
    return "".join(plain), spans


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
