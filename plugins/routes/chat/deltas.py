"""Events of a dialect in OpenAI's shapes: as deltas, and as a whole message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.contracts.dialect import (
    ArgumentsDelta,
    AssistantMessage,
    CallBegin,
    CallEnd,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCall,
)

INCOMPLETE = "incomplete"
"""`status` of a call whose arguments are no JSON object: the output ended in them, or they break off."""


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """One delta with all that these events say; empty where they say nothing to clients."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case TextDelta(text):
                delta["content"] = delta.get("content", "") + text
            case ReasoningDelta(text):
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
            case CallBegin(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ArgumentsDelta(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
            case CallEnd(index, ending):
                if ending != "complete":
                    calls.setdefault(index, {"index": index})["status"] = INCOMPLETE
    if calls:
        delta["tool_calls"] = [calls[index] for index in sorted(calls)]
    return delta


def message_data(message: AssistantMessage, echo: str = "") -> dict[str, Any]:
    """The whole message. `echo`: text that it begins with."""
    content = echo + message.content
    data: dict[str, Any] = {"role": "assistant", "content": content if content or not message.calls else None}
    if message.reasoning:
        data["reasoning_content"] = data["reasoning"] = message.reasoning
    if message.calls:
        data["tool_calls"] = [_call(call) for call in message.calls]
    return data


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    data = {"id": call.call_id, "type": "function", "function": function}
    return data if call.ending == "complete" else {**data, "status": INCOMPLETE}
