"""What the conformance suite of dialects says with them: tools, messages, ways to cut and to damage text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from dovetail.contracts.dialect import (
    ArgumentsDelta,
    AssistantMessage,
    DialectCapabilities,
    DialectParser,
    Event,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCall,
    ToolChoice,
    message_of,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "exact": {"type": "boolean"},
        "filter": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "ids": {"type": "array", "items": {"type": "integer"}}},
            "required": ["place", "ids"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}},
        "until": {"type": ["string", "null"]},
    },
    "required": ["query", "days"],
    "additionalProperties": False,
}
EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    Tool(name="get_weather", parameters=SCHEMA, strict=True),
    Tool(name="ping", parameters=EMPTY_SCHEMA, strict=True),
)
LOOSE_TOOLS = tuple(replace(tool, strict=False) for tool in TOOLS)
CHOICES = {
    "auto": ToolChoice(),
    "single": ToolChoice(parallel=False),
    "required": ToolChoice(mode="required"),
    "named": ToolChoice(mode="named", name="get_weather"),
    "allowed": ToolChoice(allowed=frozenset({"get_weather"})),
}

_WORDS = ("Paris", "the", "two", "naïve", "日本語", "🦊", "\\", '"', "'", "&amp;", "0", "-1.5", "null", "True", "a\tb")
_SIGNS = ("<", "</", ">", "[", "[/", "]", "{", "}", ",", ";", "|", "`", "```", "=", ":", "<|", "<tool", "{'a': 1}")
_SPACES = (" ", " ", " ", "\n", "\n\n", "")
_INTEGERS = ("0", "-0", "7", "-12", "12345678901234567890")
_NUMBERS = ("1.50", "0.0", "-2.25", "10", "3.14159265358979323846")


@dataclass(frozen=True)
class MessageMaker:
    """Makes messages that a dialect can express."""

    random: Random
    capabilities: DialectCapabilities
    markers: Sequence[str]

    def message(self, *, most_calls: int = 3, content: bool = True, reasoning: bool = True) -> AssistantMessage:
        """A message with any of reasoning, content and calls that there may be."""
        can = self.capabilities
        most = most_calls if can.parallel_calls else min(1, most_calls)
        calls = tuple(self.call() for _ in range(self.random.randint(0, most if can.tools else 0)))
        return AssistantMessage(
            reasoning=self.text() if can.reasoning and reasoning and self.random.random() < 0.5 else "",
            content=self.text() if content and self.random.random() < 0.7 else "",
            calls=calls,
        )

    def call(self, name: str | None = None) -> ToolCall:
        """A call whose arguments fit the tool's schema, in its order."""
        name = name or self.random.choice(["get_weather", "get_weather", "ping"])
        call_id = f"call{self.random.randint(10000, 99999)}" if self.capabilities.call_ids else ""
        return ToolCall(name=name, arguments="{}" if name == "ping" else self._arguments(), call_id=call_id)

    def text(self) -> str:
        """Text with beginnings of markers in it, and none whole."""
        pieces = [
            self.random.choice(self.random.choice([_WORDS, _WORDS, _SIGNS, self._beginnings()])) + space
            for space in self.random.choices(_SPACES, k=self.random.randint(1, 8))
        ]
        text = "".join(pieces)
        return text if not self._has_marker(text) else "No marker."

    def _has_marker(self, text: str) -> bool:
        return any(marker in text for marker in self.markers)

    def _beginnings(self) -> Sequence[str]:
        longer = [marker for marker in self.markers if len(marker) > 1]
        return [marker[: self.random.randint(1, len(marker) - 1)] for marker in longer] or _WORDS

    def _arguments(self) -> str:
        values = {
            "query": self._string(),
            "unit": json.dumps(self.random.choice(["celsius", "kelvin"])),
            "days": self.random.choice(_INTEGERS),
            "share": self.random.choice(_NUMBERS),
            "exact": self.random.choice(["true", "false"]),
            "filter": f'{{"place": {self._string()}, "ids": [{", ".join(self.random.choices(_INTEGERS, k=2))}]}}',
            "tags": f"[{', '.join(self._string() for _ in range(self.random.randint(0, 2)))}]",
            "until": self.random.choice(["null", '"next week"']),
        }
        kept = [key for key in values if key in SCHEMA["required"] or self.random.random() < 0.5]
        return "{" + ", ".join(f'"{key}": {values[key]}' for key in kept) + "}"

    def _string(self) -> str:
        text = self.text()
        if self.capabilities.markers_in_arguments and self.markers and self.random.random() < 0.3:
            text += self.random.choice(self.markers) + self.text()
        return json.dumps(text, ensure_ascii=False)


def cut(text: str, random: Random) -> list[str]:
    """The text in pieces of random lengths, some of them empty."""
    pieces, at = [], 0
    while at < len(text):
        end = at + random.choice([0, 1, 1, 2, 3, 7, 20])
        pieces.append(text[at:end])
        at = end
    return pieces


def tokens_of(text: str, markers: Iterable[str]) -> list[str]:
    """The text as a tokenizer cuts it that has the markers as tokens and no others than single characters."""
    ordered = sorted(markers, key=len, reverse=True)
    tokens, at = [], 0
    while at < len(text):
        token = next((marker for marker in ordered if text.startswith(marker, at)), text[at])
        tokens.append(token)
        at += len(token)
    return tokens


def damaged(text: str, random: Random) -> str:
    """The text with pieces left out, twice in it, moved, or with numbered words between, each word once."""
    for _ in range(random.randint(0, 2)):
        begin = random.randint(0, len(text))
        end = begin + random.randint(0, 12)
        moved = text[begin:end]
        text = text[:begin] + random.choice(["", moved + moved]) + text[end:]
    for number in range(random.randint(1, 4)):
        at = random.randint(0, len(text))
        text = f"{text[:at]}{random.choice(['', ' '])}w{number:04d}{random.choice(['', ' '])}{text[at:]}"
    return text[: random.choice([len(text), len(text), random.randint(0, len(text))])]


def parse(parser: DialectParser, pieces: Iterable[str]) -> list[Event]:
    """All events of a completion."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with adjacent deltas of one kind as one."""
    result: list[Any] = []
    for event in events:
        last = result[-1] if result else None
        if (isinstance(event, TextDelta | ReasoningDelta) and type(last) is type(event)) or (
            isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == event.index
        ):
            result[-1] = replace(last, text=last.text + event.text)
        else:
            result.append(event)
    return result


def shown(events: Iterable[Event]) -> str:
    """All text that the events show, a space between unlike kinds."""
    message = message_of(events)
    calls = [f"{call.name} {call.call_id} {call.arguments}" for call in message.calls]
    return " ".join([message.reasoning, *_texts(events), *calls])


def _texts(events: Iterable[Event]) -> Iterator[str]:
    return (event.text for event in joined(events) if isinstance(event, TextDelta))


class _Number(str):
    """A number of JSON as it is spelled."""


def values_of(arguments: str) -> Any:
    """The arguments with numbers as they are spelled, so that 1.50 and 1.5 differ."""
    return json.loads(arguments, parse_float=_Number, parse_int=_Number)


def plain(message: AssistantMessage) -> Any:
    """In a form that compares: the text of arguments may differ, their values not."""
    calls = [(call.name, call.call_id, call.ending, _values(call)) for call in message.calls]
    return message.reasoning, message.content, calls


def _values(call: ToolCall) -> Any:
    return _marked(values_of(call.arguments)) if call.ending == "complete" else call.arguments


def _marked(value: Any) -> Any:
    """A string and the number that is spelled alike are equal to Python."""
    if isinstance(value, dict):
        return [(key, _marked(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return type(value).__name__, value
