"""The body of /v1/messages, and what it asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.routes.messages.conversation import openai_messages
from dovetail.plugins.server.bodies import Ignored
from dovetail.plugins.server.sampling import SamplingFields, Strings, sampling_params
from dovetail.plugins.server.turns.formats import format_expression
from dovetail.plugins.server.turns.messages import Messages, template_messages
from dovetail.plugins.server.turns.template import template_variables
from dovetail.plugins.server.turns.tools import Tools, ToolSet, tool_set
from dovetail.plugins.server.turns.turn import Turn


class MessagesRequest(SamplingFields, kw_only=True):
    """Anthropic's fields, and vLLM's extra ones."""

    messages: Messages
    max_tokens: int | None = None
    system: str | Messages | None = None
    stop_sequences: Strings | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    cache_control: Ignored = None
    """Equal prefixes are always found again."""
    inference_geo: Ignored = None
    metadata: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    def end_user(self) -> str | None:
        """Anthropic's `metadata.user_id`, or as in OpenAI's requests."""
        given = (self.metadata or {}).get("user_id")
        return given if isinstance(given, str) and given else super().end_user()


_REFUSED: Mapping[str, str] = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no tools: give the model tools, and run them yourself",
    "context_management": "messages are shown to the model as they are",
    "stop": "its name is stop_sequences here",
    "return_token_ids": "/v1/chat/completions has them",
    "prompt_logprobs": "/v1/chat/completions has them",
    "logprobs_mode": "/v1/chat/completions has log probabilities",
    "add_special_tokens": "the chat template writes the special tokens",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one body asks for."""

    model: str
    params: SamplingParams
    turn: Turn
    shows_reasoning: bool


def what_is_asked(body: MessagesRequest, model: str, facts: EngineFacts) -> Asked:
    """Raises `APIError` 400 for what cannot be served."""
    if body.max_tokens is None:
        raise APIError(400, "max_tokens is missing", param="max_tokens")
    if body.n not in (None, 1):
        raise APIError(400, "n must be 1: a message has one answer", param="n")
    given = {
        "max_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences or ()),
        "output_kind": "delta" if body.stream else "final_only",
    }
    return Asked(
        model=model,
        turn=turn_of(body),
        params=sampling_params(body, facts, **given),
        shows_reasoning=_shows_reasoning(body.thinking),
    )


def _shows_reasoning(thinking: Mapping[str, Any] | None) -> bool:
    if thinking is None:
        return True
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise APIError(400, f"thinking.type is enabled, adaptive or disabled, not {kind!r}", param="thinking.type")
    return kind != "disabled"


def turn_of(body: MessagesRequest) -> Turn:
    """The conversation and its tools. Raises `APIError` 400."""
    for name, reason in _REFUSED.items():
        if getattr(body, name) is not None:
            raise APIError(400, f"{name} is not served: {reason}", param=name)
    messages = template_messages(openai_messages(body.system, body.messages))
    continues = messages[-1]["role"] == "assistant"
    config = dict(body.output_config or {})
    response_format = config.pop("format", None) or body.output_format
    if any(value is not None for value in config.values()):
        message = f"output_config.{min(config)} is not served: templates have no common name for it"
        raise APIError(400, message, param="output_config")
    return Turn(
        messages=messages,
        tools=_tools(body),
        response_format=format_expression(response_format, "output_config.format", has_schema_inside=True),
        template_options={
            **template_variables(body.chat_template_kwargs),
            "chat_template": body.chat_template,
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        },
    )


def _tools(body: MessagesRequest) -> ToolSet:
    tools = [_openai_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools or ())]
    choice = body.tool_choice or {}
    parallel = not choice.get("disable_parallel_tool_use")
    kind = choice.get("type", "auto")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise APIError(400, "tool_choice.type is auto, any, tool or none", param="tool_choice.type")
    named = {"type": "function", "function": {"name": str(choice.get("name", ""))}}
    return tool_set(tools, named if kind == "tool" else _CHOICES[kind], parallel)


_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}


def _openai_tool(tool: Mapping[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        message = f"{param}: the tool {tool['type']!r} runs on Anthropic's servers; this server runs no tools"
        raise APIError(400, message, param=f"{param}.type")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise APIError(400, f"{param}.input_schema must be a JSON schema", param=f"{param}.input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"], "strict": tool.get("strict")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
