"""Tools in OpenAI's form: for the chat template, and for the dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from dovetail.contracts.dialect import Tool, ToolChoice
from dovetail.contracts.route import APIError

MAX_TOOLS = 1024
"""Of a request: each is a rule of the grammar, and the model reads them all."""

Tools = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]
"""Tools, as a body has them."""


@dataclass(frozen=True, kw_only=True)
class ToolSet:
    """The tools of a request."""

    shown: tuple[dict[str, Any], ...] = ()
    """As templates show them to the model."""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)


def tool_set(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolSet:
    """From `tools`, `tool_choice` and `parallel_tool_calls`. Raises `APIError` 400 that names the field."""
    functions = [_function(tool, f"tools.{index}") for index, tool in enumerate(tools or ())]
    chosen = tool_choice(choice, parallel is not False)
    must_call = chosen.mode in ("required", "named")
    found = ToolSet(
        shown=tuple({"type": "function", "function": _without_strict(function)} for function in functions),
        tools=tuple(_tool(function, f"tools.{index}.function", must_call) for index, function in enumerate(functions)),
        choice=chosen,
    )
    _check_choice(found.choice, [tool.name for tool in found.tools])
    return found


def _check_choice(choice: ToolChoice, names: Sequence[str]) -> None:
    if choice.mode in ("required", "named") and not names:
        raise APIError(400, "tool_choice asks for a call, and the request has no tools", param="tool_choice")
    if choice.mode == "named" and choice.name not in names:
        message = f"tool_choice names {choice.name!r}, and the tools are {', '.join(names)}"
        raise APIError(400, message, param="tool_choice")
    if unknown := sorted(choice.allowed - set(names)):
        message = f"tool_choice allows {unknown[0]!r}, and the tools are {', '.join(names) or 'none'}"
        raise APIError(400, message, param="tool_choice")


def tool_choice(choice: Any, parallel: bool) -> ToolChoice:
    """From OpenAI's `tool_choice`, of chat or of responses. Raises `APIError` 400."""
    if choice is None or choice == "auto":
        return ToolChoice(parallel=parallel)
    if choice == "none":
        return ToolChoice(mode="none", parallel=parallel)
    if choice == "required":
        return ToolChoice(mode="required", parallel=parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = choice.get("function", choice)
        if isinstance(named, Mapping) and isinstance(named.get("name"), str):
            return ToolChoice(mode="named", name=named["name"], parallel=parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), parallel)
    message = "tool_choice is auto, none, required, allowed_tools, or names a function; other kinds are not served"
    raise APIError(400, message, param="tool_choice")


def _allowed(asked: Any, parallel: bool) -> ToolChoice:
    """Of `{"mode": "auto", "tools": [...]}`, whose tools are named as in chat or as in responses."""
    mode = asked.get("mode") if isinstance(asked, Mapping) else None
    tools = asked.get("tools") if isinstance(asked, Mapping) else None
    named = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not named or not all(named):
        message = (
            "tool_choice of type allowed_tools needs mode, auto or required, and tools, a list of one function or more"
            ' like {"type": "function", "name": ...}'
        )
        raise APIError(400, message, param="tool_choice")
    return ToolChoice(mode=mode, parallel=parallel, allowed=frozenset(named))


def _name_of(tool: Any) -> str:
    """Empty where it has none."""
    named = tool.get("function", tool) if isinstance(tool, Mapping) and tool.get("type") == "function" else {}
    name = named.get("name") if isinstance(named, Mapping) else None
    return name if isinstance(name, str) else ""


def _function(tool: Any, param: str) -> Mapping[str, Any]:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        message = f"{param}: tools have type function, which the client runs; {kind!r} is not served"
        raise APIError(400, message, param=f"{param}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise APIError(400, f"{param}.function is missing", param=f"{param}.function")
    return function


def _without_strict(function: Mapping[str, Any]) -> dict[str, Any]:
    """Models were trained on prompts without it."""
    return {key: value for key, value in function.items() if key != "strict" and value is not None}


def _tool(function: Mapping[str, Any], param: str, must_call: bool) -> Tool:
    """`must_call`: arguments of a call that has to be made fit the schema, whether the tool is strict or not."""
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not name:
        raise APIError(400, f"{param}.name must be text", param=f"{param}.name")
    if not isinstance(parameters, Mapping | None):
        raise APIError(400, f"{param}.parameters must be a JSON schema", param=f"{param}.parameters")
    if not isinstance(strict, bool | None):
        raise APIError(400, f"{param}.strict must be true or false", param=f"{param}.strict")
    return Tool(name=name, parameters=parameters, strict=bool(strict) or must_call)
