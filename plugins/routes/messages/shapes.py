"""Blocks and endings in Anthropic's shapes."""

from __future__ import annotations

import json
from typing import Any

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.server.turns.blocks import Block, BlockBegin, BlockDelta, BlockEvent

INCOMPLETE = "incomplete"


def block_data(block: Block) -> dict[str, Any]:
    """A whole block. Arguments that are no JSON object are shown as text, in `partial_json`."""
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    call = {"type": "tool_use", "id": block.call_id, "name": block.name}
    if block.ending != "complete":
        return {**call, "input": {}, "status": INCOMPLETE, "partial_json": block.text}
    return {**call, "input": json.loads(block.text, strict=False)}


def event_data(event: BlockEvent) -> dict[str, Any]:
    """An event of a stream."""
    index = event.block.index
    if isinstance(event, BlockBegin):
        return {"type": "content_block_start", "index": index, "content_block": _empty(event.block)}
    if isinstance(event, BlockDelta):
        return {"type": "content_block_delta", "index": index, "delta": _delta(event)}
    stop: dict[str, Any] = {"type": "content_block_stop", "index": index}
    is_cut = event.block.kind == "call" and event.block.ending != "complete"
    return {**stop, "status": INCOMPLETE} if is_cut else stop


def stop_fields(completion: CompletionOutput, blocks: list[Block]) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`: "tool_use" only where all calls are complete."""
    calls = [block for block in blocks if block.kind == "call"]
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    is_called = calls and all(call.ending == "complete" for call in calls)
    return {"stop_reason": "tool_use" if is_called else "end_turn", "stop_sequence": None}


def usage_data(output: RequestOutput, num_output_tokens: int) -> dict[str, Any]:
    """Anthropic counts prompt tokens that were found in the cache apart."""
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": "", "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(event: BlockDelta) -> dict[str, Any]:
    if event.block.kind == "text":
        return {"type": "text_delta", "text": event.text}
    if event.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}
