"""From a turn that is asked for to a request of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.contracts.dialect import Dialect, DialectRequest
from dovetail.contracts.errors import RequestError
from dovetail.contracts.prompts import ChatPrompt, PrefixVerdict, TokensPrompt
from dovetail.contracts.route import APIError, RouteHost
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.server.streams import FormOrigin
from dovetail.plugins.server.structured import FormFields, form_field
from dovetail.plugins.server.turns.formats import expression_of, form_of
from dovetail.plugins.server.turns.tools import ToolSet

_NAMED = ("tools ", "required_prefix_token_ids", "keep_rewritten")
"""How messages begin that are about another field than the messages."""

MAX_SHOWN = 8
"""Tools that a message names."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What is asked."""

    messages: Sequence[Mapping[str, Any]]
    """As `template_messages` makes them."""
    tools: ToolSet = field(default_factory=ToolSet)
    response_format: str | None = None
    """As `DialectRequest.response_format`."""
    form: StructuredOutputs | None = None
    """The response format as a form of its own, where it came as one."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `EngineClient.render_chat`."""

    def request(self, tail: str = "") -> DialectRequest:
        """For the dialect."""
        return DialectRequest(
            tools=self.tools.tools,
            choice=self.tools.choice,
            response_format=self.response_format,
            prompt_tail=tail,
        )


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    """What the engine is asked, and what reads the answer."""

    prompt: TokensPrompt
    params: SamplingParams
    request: DialectRequest
    prefix: PrefixVerdict | None = None
    """As `ChatPrompt.prefix`."""


async def prepare(host: RouteHost, turn: Turn, params: SamplingParams) -> PreparedTurn:
    """Renders the conversation, and adds to `params` what the dialect needs. Raises `APIError` 400 for what the model,
    its template or its dialect cannot do."""
    turn, params = _with_form(host.dialect, turn, params)
    chat = await render(host, turn)
    request = turn.request(chat.tail)
    if not _may_reason(host.dialect, turn, chat.tail):
        request = replace(request, reasoning=False)
    form = _form_alone(host.dialect, turn, request)
    if form is not None:
        params = replace(params, structured_outputs=form)
    params = _with_dialect(params, host.dialect, request)
    return PreparedTurn(prompt=chat.prompt, params=params, request=request, prefix=chat.prefix)


def form_origin(fields: FormFields, prepared: PreparedTurn, format_field: str) -> FormOrigin:
    """Which field of a body asks for the form of the answer, and for which tools. `format_field`: the body's field for
    response formats."""
    request = prepared.request
    given = form_field(fields) or (format_field if request.response_format is not None else None)
    if given is not None or not request.tools:
        return FormOrigin(given or format_field)
    names = [tool.name for tool in request.tools if tool.strict] or [tool.name for tool in request.tools]
    if request.choice.mode == "named":
        names = [request.choice.name]
    shown = ", ".join(map(repr, names[:MAX_SHOWN])) + (", ..." if len(names) > MAX_SHOWN else "")
    return FormOrigin("tools", f"tool {shown}" if len(names) == 1 else f"one of the tools {shown}")


async def render(host: RouteHost, turn: Turn) -> ChatPrompt:
    """The prompt of a turn. Raises `APIError` 400 as `prepare` does."""
    if turn.template_options.get("chat_template") is not None and not host.request_chat_templates:
        message = (
            "this server takes no templates from requests: leave chat_template out (server.request_chat_templates)"
        )
        raise APIError(400, message, param="chat_template")
    try:
        host.dialect.validate(turn.request())
    except RequestError as error:
        raise APIError(400, str(error), param="tools" if turn.tools.tools else "response_format") from error
    tools = list(turn.tools.shown) or None
    try:
        return await host.engine.render_chat(turn.messages, tools=tools, **turn.template_options)
    except RequestError as error:
        param = next((name for name in _NAMED if str(error).startswith(name)), "messages").strip()
        raise APIError(400, str(error), param=param) from error


def _with_form(dialect: Dialect, turn: Turn, params: SamplingParams) -> tuple[Turn, SamplingParams]:
    """Structured outputs become the response format where they can: the dialect knows how that goes with reasoning and
    calls."""
    asked = params.structured_outputs
    if asked is None:
        return turn, params
    if turn.response_format is not None:
        message = "structured_outputs and response_format exclude each other: give one of them"
        raise APIError(400, message, param="structured_outputs")
    expression = expression_of(asked) if dialect.capabilities.grammars else None
    if expression is not None:
        return replace(turn, response_format=expression, form=asked), replace(params, structured_outputs=None)
    if turn.tools.tools and turn.tools.choice.mode != "none":
        message = "this form of structured_outputs leaves no room for calls: leave out tools, or ask for JSON"
        raise APIError(400, message, param="structured_outputs")
    return turn, params


def _with_dialect(params: SamplingParams, dialect: Dialect, request: DialectRequest) -> SamplingParams:
    """With the dialect's stop tokens, the text of its markers, and its grammar."""
    ids = dialect.setup.special_tokens
    stops = [ids[token] for token in dialect.stop_tokens if token in ids]
    changes: dict[str, Any] = {
        "stop_token_ids": tuple(dict.fromkeys([*params.stop_token_ids, *stops])),
        "kept_special_tokens": tuple(sorted(ids[token] for token in dialect.kept_tokens)),
        "structured_outputs": _form(params.structured_outputs, dialect, request),
    }
    try:
        return replace(params, **changes)
    except RequestError as error:
        raise APIError(400, str(error)) from error


def _form(asked: StructuredOutputs | None, dialect: Dialect, request: DialectRequest) -> StructuredOutputs | None:
    """The dialect's grammar, or else what was asked, behind reasoning that the prompt opens."""
    if asked is not None:
        closing = _closing_marker(dialect, request.prompt_tail)
        return asked if asked.starts_after or not closing else replace(asked, starts_after=closing)
    try:
        grammar = dialect.grammar(request)
    except RequestError as error:
        raise APIError(400, str(error), param="tools") from error
    # Where these characters are in a schema, they would be taken for the sign of another notation.
    return None if grammar is None else StructuredOutputs(grammar=grammar.replace("::=", ":\\u003a="))


def _form_alone(dialect: Dialect, turn: Turn, request: DialectRequest) -> StructuredOutputs | None:
    """The response format where an answer has nothing else, neither reasoning nor calls. Every grammar plugin has JSON
    and choices, and not every one the language of a dialect's grammar."""
    may_call = bool(request.tools) and request.choice.mode != "none"
    may_reason = dialect.reasoning_markers is not None and request.reasoning
    if request.response_format is None or may_call or may_reason:
        return None
    return turn.form or form_of(request.response_format)


def _may_reason(dialect: Dialect, turn: Turn, tail: str) -> bool:
    """Whether the answer may begin with reasoning: the prompt opens it, or has none and the model knows the markers."""
    if dialect.reasoning_markers is None or _closing_marker(dialect, tail):
        return True
    closing = dialect.reasoning_markers[1].strip()
    return closing not in tail and (dialect.may_reason or closing in (turn.template_options.get("chat_template") or ""))


def _closing_marker(dialect: Dialect, tail: str) -> str:
    """The marker that ends reasoning, where the prompt ends within reasoning."""
    if dialect.reasoning_markers is None:
        return ""
    opening, closing = (marker.strip() for marker in dialect.reasoning_markers)
    return closing if tail.rfind(opening) > tail.rfind(closing) else ""
