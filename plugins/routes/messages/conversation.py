"""A conversation in Anthropic's form, as one in OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.route import APIError
from dovetail.plugins.server.turns.messages import check_num_parts, refused_part


def openai_messages(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, calls and thinking parts of the assistant's. Raises `APIError` 400
    that names the field."""
    check_num_parts(messages, "messages")
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _texts(system, "system")})
    for index, message in enumerate(messages):
        found += _messages(message, f"messages.{index}")
    return found


def _messages(message: Mapping[str, Any], param: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise APIError(400, f"{param}.role is user or assistant, not {role!r}", param=f"{param}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise APIError(400, f"{param}.content must be text or a list of blocks", param=f"{param}.content")
    blocks = [_checked(block, f"{param}.content.{index}") for index, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, f"{param}.content")]
    placed = [(block, f"{param}.content.{index}") for index, block in enumerate(blocks)]
    results = [_result(block, where) for block, where in placed if block["type"] == "tool_result"]
    rest = [_text_part(block, where) for block, where in placed if block["type"] != "tool_result"]
    return [*results, *([{"role": role, "content": rest}] if rest or not results else [])]


def _checked(block: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise APIError(400, f"{param} must be a block with a type", param=param)
    return block


def _assistant(blocks: Sequence[Mapping[str, Any]], param: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{param}.{index}"
        if block["type"] == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif block["type"] == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block["type"] != "redacted_thinking":
            texts.append(_text_part(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": texts or None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _result(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    content = block.get("content")
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id"),
        "content": "" if content is None else _texts(content, f"{param}.content"),
    }


def _texts(content: Any, param: str) -> str:
    """Templates take text alone for the system and for results."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(400, f"{param} must be text or a list of blocks", param=param)
    parts = [_text_part(_checked(block, f"{param}.{i}"), f"{param}.{i}") for i, block in enumerate(content)]
    return "\n".join(part["text"] for part in parts)


def _text_part(block: Mapping[str, Any], param: str) -> dict[str, str]:
    if block["type"] != "text":
        raise refused_part(block["type"], f"{param}.type")
    if not isinstance(block.get("text"), str):
        raise APIError(400, f"{param}.text must be text", param=f"{param}.text")
    return {"type": "text", "text": block["text"]}
