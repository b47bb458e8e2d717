"""The body of /v1/responses, and what it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.routes.responses.items import openai_messages
from dovetail.plugins.server.bodies import Ignored
from dovetail.plugins.server.sampling import SamplingFields, sampling_params, token_limit
from dovetail.plugins.server.turns.formats import format_expression
from dovetail.plugins.server.turns.messages import MAX_MESSAGES, Messages, template_messages
from dovetail.plugins.server.turns.template import template_variables
from dovetail.plugins.server.turns.tools import Tools, ToolSet, tool_set
from dovetail.plugins.server.turns.turn import Turn


class ResponsesRequest(SamplingFields, kw_only=True):
    """OpenAI's fields, and vLLM's extra ones."""

    input: str | Messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: Tools | None = None
    truncation: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: bool | None = None
    conversation: Any = None
    include: list[str] | None = None
    prompt: Any = None
    top_logprobs: int | None = None
    max_tool_calls: Ignored = None
    """It bounds tools that a server runs, and this one runs none."""


_LOGPROBS = "message.output_text.logprobs"
"""Of `include`."""

_REFUSED: Mapping[str, str] = {
    "conversation": "give previous_response_id, or all items",
    "prompt": "this server keeps no prompts",
    "prompt_logprobs": "/v1/chat/completions has those of prompts",
    "return_token_ids": "/v1/chat/completions has token ids",
    "add_special_tokens": "the chat template writes the special tokens",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one body asks for."""

    model: str
    params: SamplingParams
    turn: Turn
    with_logprobs: bool
    """Whether text comes with the log probabilities of its tokens."""
    items: Sequence[Mapping[str, Any]]
    """All items of the conversation, those of earlier responses first."""
    shown: Mapping[str, Any]
    """Fields that the response repeats."""


def what_is_asked(
    body: ResponsesRequest, model: str, facts: EngineFacts, earlier: Sequence[Mapping[str, Any]]
) -> Asked:
    """`earlier`: the items of the response before. Raises `APIError` 400 for what cannot be served."""
    _refuse(body)
    for name in ("input", "tools", "tool_choice", "text", "reasoning"):
        _check_repeatable(name, getattr(body, name))
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items = [*earlier, *given]
    if len(items) > MAX_MESSAGES:
        message = f"input: the conversation has {len(items)} items, those of earlier responses included, and may have"
        raise APIError(400, f"{message} {MAX_MESSAGES}: begin another, or leave items out", param="input")
    with_logprobs = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    given_params = {
        "max_tokens": token_limit(body.max_output_tokens, facts),
        "logprobs": (body.top_logprobs or 0) if with_logprobs else None,
        "output_kind": "delta" if body.stream else "final_only",
    }
    params = sampling_params(body, facts, **given_params)
    return Asked(
        model=model,
        params=params,
        turn=_turn(body, items),
        with_logprobs=with_logprobs,
        items=items,
        shown=_shown(body, params),
    )


def _refuse(body: ResponsesRequest) -> None:
    for name, reason in _REFUSED.items():
        if getattr(body, name) is not None:
            raise APIError(400, f"{name} is not served: {reason}", param=name)
    if body.n not in (None, 1):
        raise APIError(400, "n must be 1: a response is one", param="n")
    if body.background:
        raise APIError(400, "background is not served: read the response, or its stream", param="background")
    for asked in body.include or ():
        if asked != _LOGPROBS:
            raise APIError(400, f"include: {asked!r} is not served, only {_LOGPROBS!r} is", param="include")
    if body.truncation not in (None, "disabled"):
        raise APIError(400, "truncation must be disabled: messages are shown whole", param="truncation")
    summary = (body.reasoning or {}).get("summary")
    if summary not in (None, "auto"):
        message = "reasoning.summary must be auto or left out: reasoning is returned as it is, and not summed up"
        raise APIError(400, message, param="reasoning.summary")


def _check_repeatable(name: str, value: Any) -> None:
    """A response repeats the field, and the next one its items."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise APIError(400, f"{name} cannot be repeated in the response: {error}", param=name) from None


def _turn(body: ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> Turn:
    options = {**template_variables(body.chat_template_kwargs), "chat_template": body.chat_template}
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        options["reasoning_effort"] = effort
    text = dict(body.text or {})
    response_format = text.pop("format", None)
    if any(value is not None for value in text.values()):
        message = f"text.{min(text)} is not served: say in a message how long the answer should be"
        raise APIError(400, message, param=f"text.{min(text)}")
    try:
        messages = template_messages(openai_messages(body.instructions, items))
    except APIError as error:
        raise APIError(400, str(error), param="input") from None
    return Turn(
        messages=messages,
        tools=_tools(body),
        response_format=format_expression(response_format, "text.format", has_schema_inside=True),
        template_options=options,
    )


def _tools(body: ResponsesRequest) -> ToolSet:
    tools = [_wrapped(tool, f"tools.{index}") for index, tool in enumerate(body.tools or ())]
    return tool_set(tools, body.tool_choice, body.parallel_tool_calls)


def _wrapped(tool: Mapping[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{param}: the tool {tool.get('type')!r} runs on OpenAI's servers; this server runs no tools"
        raise APIError(400, message, param=f"{param}.type")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _shown(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "temperature": params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "top_logprobs": body.top_logprobs or 0,
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
        "top_p": params.top_p,
        "truncation": "disabled",
    }
