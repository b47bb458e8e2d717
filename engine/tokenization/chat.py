"""Chat templates as Hugging Face checkpoints carry them: Jinja in a sandbox, with a few helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Name, Node, Scope
from jinja2.parser import Parser

from dovetail.contracts.errors import RequestError
from dovetail.engine.tokenization.template_content import asks_for_content, reads_parts
from dovetail.engine.tokenization.template_limits import LimitedEnvironment
from dovetail.engine.tokenization.template_weights import TemplateLimitError

_MARK = "\ue000final-message-ends-here\ue001 "
"""Stands at the end of a message that is to be continued. The space tells whether the template trims messages."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str):
        """Raises `RequestError` for a template that does not compile."""
        environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.limit_filters()
        self._environment = environment
        try:
            parsed = environment.parse(source)
            self.names = frozenset(node.name for node in parsed.find_all(Name))
            """Every variable that the template speaks of."""
            self._takes_parts = reads_parts(parsed)
            self._needs_content = not asks_for_content(parsed)
            """It reads the content of every message, and one that only calls tools has none."""
            self._template = environment.from_string(source)
        except Exception as error:
            # Not jinja's own errors alone: Python compiles what jinja wrote, and constants are computed on the way.
            raise RequestError(f"the chat template is not valid Jinja: {_words(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as text.

        Content in parts becomes text, joined by line breaks as in vLLM, where the template does not go over parts.
        `continue_final_message` cuts the text behind the last message's content, for the model to go on from there.
        Raises `RequestError`.
        """
        _check_messages(messages)
        # Keys without a value are how OpenAI's clients say that they have none; templates ask whether a key exists.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        chat = [_with_content(message, self._takes_parts) for message in chat]
        if not chat:
            raise RequestError("a conversation needs at least one message")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other: set one to false")
        final = _mark_end(chat) if continue_final_message else ""
        if self._needs_content:
            chat = [{"content": "", **message} if "tool_calls" in message else message for message in chat]
        self._environment.begin(_num_chars(chat) + _num_chars(variables))
        try:
            text = self._template.render(messages=chat, add_generation_prompt=add_generation_prompt, **variables)
        except TemplateLimitError as error:
            raise RequestError(f"the chat template was stopped: {error}; give chat_template another one") from error
        except Exception as error:
            # Templates run whatever their authors wrote on whatever was sent: any error is about this one request.
            raise RequestError(f"the chat template refused the messages: {_words(error)}") from error
        return _cut_at_mark(text, final) if continue_final_message else text


def _check_messages(messages: object) -> None:
    wrong = [messages]
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes | bytearray | memoryview):
        wrong = [message for message in messages if not isinstance(message, Mapping)]
    if wrong:
        raise RequestError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {wrong[0]!r}")


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own form

    def parse(self, parser: Parser) -> Node:
        scope = Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself, or is nested, too deeply"
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    return str(error) or type(error).__name__


def _num_chars(value: Any) -> int:
    """Characters of the texts in plain data, and its items."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return len(value) + sum(map(_num_chars, value.values()))
    return len(value) + sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys, and models were trained without either.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_environment
def _strftime_now(environment: LimitedEnvironment, form: str) -> str:
    environment.charge_date(form)
    return datetime.now().strftime(form)


def _with_content(message: dict[str, Any], takes_parts: bool) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    texts = [_part_text(part) for part in content]
    return message if takes_parts else {**message, "content": "\n".join(texts)}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(f"a message has a content part of type {kind!r}, and models take text only here")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"a message has a content part without text: {part!r}")
    return str(part["text"])


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Puts the mark behind the text of the last message, in `chat` alone; returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return content
    parts = [dict(part) for part in content or [] if isinstance(part, Mapping)]
    texts = [part for part in parts if isinstance(part.get("text"), str)]
    if not texts:
        raise RequestError("continue_final_message needs a last message with text to continue")
    text: str = texts[-1]["text"]
    texts[-1]["text"] = text + _MARK
    chat[-1]["content"] = parts
    return text


def _cut_at_mark(text: str, final: str) -> str:
    place = text.rfind(_MARK.rstrip())
    if place < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message cannot be used: the chat template does not show the last message whole"
        )
    is_trimmed = not text.startswith(_MARK, place)
    return text[:place].rstrip() if is_trimmed else text[:place]
