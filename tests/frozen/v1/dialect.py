"""A dialect of single characters: ~reasoning%content^name, a line break, JSON$."""

import json
from typing import Any

from dovetail.contracts.dialect import (
    MAX_HEAD,
    ArgumentsDelta,
    AssistantMessage,
    CallBegin,
    CallEnd,
    Dialect,
    DialectCapabilities,
    DialectNeed,
    DialectParser,
    DialectRequest,
    Event,
    ReasoningDelta,
    TextDelta,
    Tool,
)
from dovetail.contracts.errors import RequestError
from dovetail.contracts.plugin import Environment, PluginOptions

TEXT = r"/[^\^$~%]*/"


class Options(PluginOptions):
    reserved: str = ""
    """A tool's name that is refused."""


class Parser(DialectParser):
    def __init__(self, request: DialectRequest):
        self._has_calls = bool(request.tools) and request.choice.mode != "none"
        self._mode = "reasoning" if request.prompt_tail.rfind("~") > request.prompt_tail.rfind("%") else "start"
        self._index = 0
        self._head = self._arguments = ""
        self._is_in_string = self._is_escaped = False

    def push(self, text: str) -> list[Event]:
        return [event for char in text for event in self._char(char)]

    def finish(self) -> list[Event]:
        if self._mode == "head":
            return [TextDelta("^" + self._head)]
        return [CallEnd(self._index, "truncated")] if self._mode == "arguments" else []

    def _char(self, char: str) -> list[Event]:
        if self._mode == "reasoning":
            self._mode = "text" if char == "%" else "reasoning"
            return [ReasoningDelta(char)] if char != "%" else []
        if self._mode == "head":
            return self._in_head(char)
        if self._mode == "arguments":
            return self._in_arguments(char)
        if char == "~" and self._mode == "start":
            self._mode = "reasoning"
            return []
        self._mode = "text"
        if char == "^" and self._has_calls:
            self._mode, self._head = "head", ""
            return []
        return [TextDelta(char)]

    def _in_head(self, char: str) -> list[Event]:
        if char == "\n" and self._head:
            self._mode, self._arguments = "arguments", ""
            self._is_in_string = self._is_escaped = False
            return [CallBegin(self._index, self._head)]
        if char in "\n^$" or len(self._head) > MAX_HEAD - 3:
            self._mode = "text"
            return [TextDelta("^" + self._head), *self._char(char)]
        self._head += char
        return []

    def _in_arguments(self, char: str) -> list[Event]:
        if char != "$" or self._is_in_string:
            self._arguments += char
            is_quote = char == '"' and not self._is_escaped
            self._is_in_string = self._is_in_string is not is_quote
            self._is_escaped = char == "\\" and not self._is_escaped
            return [ArgumentsDelta(self._index, char)]
        self._mode, self._index = "text", self._index + 1
        return [CallEnd(self._index - 1, "complete" if _is_object(self._arguments) else "malformed")]


def _is_object(text: str) -> bool:
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
        return isinstance(found, dict)
    except ValueError:
        return False


class Frozen(Dialect):
    contract = (1, 0)
    Options = Options
    capabilities = DialectCapabilities(
        tools=True, parallel_calls=True, reasoning=True, grammars=True, markers_in_arguments=True
    )
    markers = ("^", "$", "~", "%")
    reasoning_markers = ("~", "%")
    stop_tokens = ("<|eot|>",)

    @classmethod
    def check(cls, need: DialectNeed, options: Options, environment: Environment) -> list[str]:
        is_own = need.is_named or "^" in (need.chat_template or "") or need.architecture == "FrozenForCausalLM"
        return [] if is_own or "^" in need.special_tokens else ["the model has no ^"]

    def validate(self, request: DialectRequest) -> None:
        super().validate(request)
        if any(tool.name == self.options.reserved for tool in request.tools):
            raise RequestError(f"{self.options.reserved} is reserved")

    def parser(self, request: DialectRequest) -> DialectParser:
        return Parser(request)

    def grammar(self, request: DialectRequest) -> str | None:
        choice = request.choice
        allowed = choice.allowed or {tool.name for tool in request.tools}
        named = [tool for tool in request.tools if choice.name in ("", tool.name)]
        tools = [tool for tool in named if choice.mode != "none" and tool.name in allowed]
        is_bound = choice.mode != "auto" or not choice.parallel or choice.allowed or any(tool.strict for tool in tools)
        if request.response_format is None and not (tools and is_bound):
            return None
        one = f"{self._marker('^')} ({' | '.join(map(self._call, tools))}) {self._marker('$')}"
        many = "*" if choice.parallel and choice.mode != "named" else ""
        if request.response_format is not None:
            body = f"{one} ({one}){many} | {request.response_format}" if tools else request.response_format
        elif choice.mode == "auto":
            body = f"TEXT ({one} TEXT){many or '?'}"
        else:
            body = f"{one} ({one})*" if many else one
        return f"start: {self._thought(request)} ({body})\nTEXT: {TEXT}\nTHOUGHT: /[^%]*/\n"

    def _thought(self, request: DialectRequest) -> str:
        end = f"{'THOUGHT' if request.reasoning else ''} {self._marker('%')}"
        if request.prompt_tail.rfind("~") > request.prompt_tail.rfind("%"):
            return end
        return f"({self._marker('~')} {end})?" if request.reasoning else ""

    def _marker(self, marker: str) -> str:
        ids = self.setup.special_tokens
        return f"<[{ids[marker]}]>" if marker in ids else json.dumps(marker, ensure_ascii=False)

    def _call(self, tool: Tool) -> str:
        schema: Any = tool.parameters if tool.strict else None
        return f"{json.dumps(tool.name + chr(10))} %json {json.dumps(schema or {'type': 'object'})}"

    def render_message(self, message: AssistantMessage) -> str:
        calls = "".join(f"^{call.name}\n{call.arguments}$" for call in message.calls)
        return (f"~{message.reasoning}%" if message.reasoning else "") + message.content + calls
