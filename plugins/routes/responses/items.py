"""Items of a response: from those of a conversation to messages, and from blocks to items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.route import APIError
from dovetail.plugins.server.turns.blocks import Block
from dovetail.plugins.server.turns.messages import check_num_parts, refused_part

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def openai_messages(instructions: str | None, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in the form of chat completions. What the assistant said in one turn (reasoning, text, calls) is
    one message. Raises `APIError` 400 that names the field."""
    check_num_parts(items, "input")
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # of the assistant, as far as items of it came
    for index, item in enumerate(items):
        said = _said(item, f"input.{index}")
        if said is None:
            turn = None
            found.append(_heard(item, f"input.{index}"))
            continue
        if turn is None or ("content" in said and ("content" in turn or "tool_calls" in turn)):
            turn = {"role": "assistant"}
            found.append(turn)
        if "tool_calls" in said:
            turn.setdefault("tool_calls", []).extend(said["tool_calls"])
        else:
            turn.update(said)
    return found


def _said(item: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """Of an item that the assistant said, the fields of its message."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"reasoning_content": "\n".join(text for text in _texts(parts, f"{param}.content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": _content(item.get("content"), f"{param}.content")}
    return None


def _heard(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), f"{param}.content")}
    if kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else "\n".join(_texts(output, f"{param}.output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    message = f"{param}: an item of type {kind!r} is not served: send messages, reasoning, calls and their outputs"
    raise APIError(400, message, param=f"{param}.type")


def _content(content: Any, param: str) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text} for text in _texts(content, param)]


def _texts(parts: Any, param: str) -> list[str]:
    if not isinstance(parts, list):
        raise APIError(400, f"{param} must be text or a list of parts", param=param)
    return [_text(part, f"{param}.{index}") for index, part in enumerate(parts)]


def _text(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal":
        return str(part.get("refusal") or "")
    if kind not in _TEXTS:
        raise refused_part(kind, f"{param}.type")
    if not isinstance(part.get("text"), str):
        raise APIError(400, f"{param}.text must be text", param=f"{param}.text")
    return str(part["text"])


def item_id(response_id: str, block: Block) -> str:
    """Equal for a stream and what is kept of it."""
    prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
    return f"{prefix}_{response_id.removeprefix('resp_')}_{block.index}"


def begun_item(response_id: str, block: Block) -> dict[str, Any]:
    """The item of a block that begins."""
    head = {"id": item_id(response_id, block), "status": "in_progress"}
    if block.kind == "text":
        return {**head, "type": "message", "role": "assistant", "content": []}
    if block.kind == "reasoning":
        return {**head, "type": "reasoning", "summary": [], "content": []}
    return {**head, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": ""}


def whole_item(response_id: str, block: Block, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The item of a block that is over. `logprobs`: of text."""
    item = begun_item(response_id, block) | {"status": "completed" if block.ending == "complete" else "incomplete"}
    if block.kind == "call":
        return {**item, "arguments": block.text}
    return {**item, "content": [part_of(block, block.text, logprobs)]}


def part_of(block: Block, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The content part of a block of text or reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
