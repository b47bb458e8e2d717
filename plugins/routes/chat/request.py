"""The body of /v1/chat/completions, and what it asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.outputs import RequestMetrics
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.server.bodies import Body
from dovetail.plugins.server.sampling import sampling_params, token_limit
from dovetail.plugins.server.transfer import TransferFields, transfer_values
from dovetail.plugins.server.turns.formats import format_expression
from dovetail.plugins.server.turns.messages import Messages, template_messages
from dovetail.plugins.server.turns.template import template_variables
from dovetail.plugins.server.turns.tools import Tools, tool_set
from dovetail.plugins.server.turns.turn import Turn
from dovetail.plugins.server.usage import with_prediction


class PredictedPart(Body, kw_only=True):
    """A part of a prediction's text."""

    type: Literal["text"]
    text: str


class Prediction(Body, kw_only=True):
    """What much of the answer is expected to be."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(TransferFields, kw_only=True):
    """OpenAI's fields, and vLLM's extra ones."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_accepted_spans: bool | None = None

    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    required_prefix_token_ids: list[int] | None = None
    keep_rewritten: bool | None = None
    echo: bool | None = None
    documents: Messages | None = None

    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    prediction: Prediction | None = None


_REFUSED: Mapping[str, str] = {
    "functions": "functions became tools: send tools",
    "function_call": "function_call became tool_choice",
    "audio": "no sound is generated",
    "web_search_options": "this server searches nothing: give the model a tool",
    "verbosity": "say in a message how long the answer should be",
    "add_special_tokens": "the chat template writes the special tokens",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one body asks for."""

    model: str
    """The name that responses show."""
    params: SamplingParams
    turn: Turn
    echo: str
    """Text that the response begins with: that of the message which is continued."""
    shows_reasoning: bool
    with_logprobs: bool
    tokens_as_ids: bool
    with_token_ids: bool
    with_accepted: bool
    """Whether each token comes with its text, marked where it is an accepted draft."""
    with_prompt_logprobs: bool

    def usage(self, counts: dict[str, Any], metrics: RequestMetrics) -> dict[str, Any]:
        """`counts`, and what became of the prediction where there is one."""
        return counts if self.params.prediction is None else with_prediction(counts, metrics)


def what_is_asked(body: ChatRequest, model: str, facts: EngineFacts) -> Asked:
    """Raises `APIError` 400 for what cannot be served."""
    for name, reason in _REFUSED.items():
        if getattr(body, name) is not None:
            raise APIError(400, f"{name} is not served: {reason}", param=name)
    if body.modalities not in (None, ["text"]):
        raise APIError(400, "modalities must be [text]: other ones are not generated", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs need logprobs: true", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.prompt_logprobs is not None and body.stream:
        raise APIError(400, "prompt_logprobs come whole: leave stream out", param="prompt_logprobs")
    given: dict[str, Any] = {
        "max_tokens": token_limit(limit, facts),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "output_kind": "delta" if body.stream else "final_only",
        "prediction": None if body.prediction is None else body.prediction.text,
        **transfer_values(body, facts),
    }
    turn = turn_of(body)
    return Asked(
        model=model,
        params=sampling_params(body, facts, **given),
        turn=turn,
        echo=_echo(body, turn),
        shows_reasoning=body.include_reasoning is not False,
        with_logprobs=bool(body.logprobs),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        with_token_ids=bool(body.return_token_ids) or body.required_prefix_token_ids is not None,
        with_accepted=bool(body.return_accepted_spans),
        with_prompt_logprobs=body.prompt_logprobs is not None,
    )


def turn_of(body: ChatRequest) -> Turn:
    """The conversation, its tools and its template. Raises `APIError` 400."""
    continues = bool(body.continue_final_message)
    options: dict[str, Any] = {
        **template_variables(body.chat_template_kwargs),
        "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continues,
        "chat_template": body.chat_template,
    }
    # Only where they are given: a template that does not read one of them refuses it.
    for name in ("reasoning_effort", "documents", "required_prefix_token_ids", "keep_rewritten"):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    return Turn(
        messages=template_messages(body.messages),
        tools=tool_set(body.tools, body.tool_choice, body.parallel_tool_calls),
        response_format=format_expression(body.response_format),
        template_options=options,
    )


def _echo(body: ChatRequest, turn: Turn) -> str:
    if not body.echo:
        return ""
    content = turn.messages[-1].get("content")
    if not body.continue_final_message or not isinstance(content, str):
        message = "echo shows the message that is continued: set continue_final_message, and give its content as text"
        raise APIError(400, message, param="echo")
    return content
