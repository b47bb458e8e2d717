"""A conversation in OpenAI's form, as chat templates read it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from dovetail.contracts.route import APIError
from dovetail.plugins.server.surrogates import half_pair_in

MAX_MESSAGES = 8192
"""Of a conversation: each is read on the event loop, by which all streams go."""
MAX_PARTS = 16384
"""Of a conversation: content parts, calls and results within its messages."""

Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
"""A conversation, as a body has it."""

_NESTED = ("content", "tool_calls", "summary", "output")
"""Keys of messages and items that may have lists."""
_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"})
_UNREAD = frozenset({"annotations", "refusal"})
"""Of messages that a server sent: they are shown to no model."""

_MEDIA = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "sound",
    "audio": "sound",
    "audio_url": "sound",
    "video_url": "videos",
    "video": "videos",
    "file": "files",
    "input_file": "files",
    "document": "files",
}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text alone, arguments of calls as objects, and reasoning as `reasoning_content`. Messages of
    developers are the system's, which every template knows. Raises `APIError` 400 that names the field."""
    if not messages:
        raise APIError(400, "messages is empty: give at least one message", param="messages")
    check_num_parts(messages, "messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def check_num_parts(messages: Iterable[Mapping[str, Any]], param: str) -> None:
    """Raises `APIError` 400, of the field `param`, where messages or items have more parts than are read."""
    num_parts = sum(map(_num_parts, messages))
    if num_parts > MAX_PARTS:
        message = (
            f"{param}: the messages have {num_parts} content parts and calls, and may have {MAX_PARTS}: join texts"
        )
        raise APIError(400, message, param=param)


def _num_parts(value: Mapping[str, Any]) -> int:
    """Those within its parts included, however deep they are nested."""
    found, left = 0, [value]
    while left:
        inner = left.pop()
        for parts in (inner[name] for name in _NESTED if isinstance(inner.get(name), list)):
            found += len(parts)
            left += [part for part in parts if isinstance(part, Mapping)]
    return found


def refused_part(kind: object, param: str) -> APIError:
    """The refusal of a content part that is no text."""
    media = _MEDIA.get(str(kind))
    reason = f"{media} are not served yet, models take text only" if media else "content parts have type text"
    return APIError(400, f"{param}: a content part of type {kind!r}: {reason}", param=param)


def _message(given: Mapping[str, Any], param: str) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        reason = f"{param}.role is missing: user, assistant, system, developer or tool"
        raise APIError(400, reason, param=f"{param}.role")
    if role == "function" or "function_call" in message:
        raise APIError(400, f"{param}: functions became tools: send tools, tool_calls and role tool", param=param)
    unknown = sorted(message.keys() - _KEYS - _UNREAD)
    if unknown:
        raise APIError(400, f"{param} has the unknown key {unknown[0]!r}", param=f"{param}.{unknown[0]}")
    found: dict[str, Any] = {key: message[key] for key in ("name", "tool_call_id") if key in message}
    found["role"] = "system" if role == "developer" else role
    if "content" in message:
        found["content"] = _content(message["content"], f"{param}.content")
    elif not message.get("tool_calls"):
        found["content"] = ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        found["reasoning_content"] = _text(reasoning, f"{param}.reasoning_content")
    if message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], f"{param}.tool_calls")
    return found


def _content(content: Any, param: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(400, f"{param} must be text or a list of parts", param=param)
    return [_part(part, f"{param}.{index}") for index, part in enumerate(content)]


def _part(part: Any, param: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise APIError(400, f"{param} must be an object with type and text", param=param)
    kind = part.get("type", "text")
    if kind == "refusal":
        return {"type": "text", "text": _text(part.get("refusal"), f"{param}.refusal")}
    if kind != "text":
        raise refused_part(kind, f"{param}.type")
    return {"type": "text", "text": _text(part.get("text"), f"{param}.text")}


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise APIError(400, f"{param} must be text", param=param)
    return value


def _calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise APIError(400, f"{param} must be a list", param=param)
    return [_call(call, f"{param}.{index}") for index, call in enumerate(calls)]


def _call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise APIError(400, f"{param} must have a function with a name", param=param)
    arguments = arguments_of(function.get("arguments"), f"{param}.function.arguments")
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def arguments_of(text: Any, param: str) -> dict[str, Any]:
    """Arguments of a call as an object, which is what templates read."""
    if text in (None, ""):
        return {}
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        message = f"{param} is no JSON ({error}): leave calls out that the model did not finish"
        raise APIError(400, message, param=param) from None
    if not isinstance(found, dict):
        raise APIError(400, f"{param} must be a JSON object", param=param)
    if half_pair_in(found) is not None:
        raise APIError(400, f"{param}: half of a surrogate pair is no character: leave it out", param=param)
    return found
