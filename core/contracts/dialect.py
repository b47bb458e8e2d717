"""Dialect: how one family of chat models writes reasoning and tool calls as text, both ways.

One object has all that concerns the text between a model and an API: the parser of what the model writes, the grammar
that keeps it to what was asked for, the text that the model is expected to write for a message, the markers that
decoding must keep, the tokens that end a turn. Prompts are rendered by the model's chat template; a dialect sees only
the end of one. The laws, which `dovetail.testing.dialect_suite` tests:

- Events depend on the text alone, never on how it was cut into pieces; adjacent deltas count as one.
- Parsing what `render_message` writes gives the message back, where no text of it has one of the `markers`.
- Texts that `grammar` accepts parse into complete calls of the tools; `grammar` accepts what `render_message` writes.
- The argument deltas of a call that ends complete are one JSON object, numbers spelled as the model spelled them.
- Names and the strings of complete arguments are valid Unicode: half of a surrogate pair (`\\ud83e`) is in neither.
- All text is in the events, once, but for markers and the syntax around them. What looks like a call and is none is
  content; where that shows only after `CallBegin`, the call ends malformed and what follows it is content.
- Of text that may begin a marker no more is held back than the longest marker has characters, and of what may begin a
  call (or lie between its parts) no more than `MAX_HEAD`.

So `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, however it comes, is

    CallBegin(0, "add"), ArgumentsDelta(0, '{"a": 1}'), CallEnd(0, "complete")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dovetail.contracts.errors import RequestError
from dovetail.contracts.needs import backed_by, compared, informs
from dovetail.contracts.plugin import Plugin, PluginOptions

MAX_HEAD = 512
"""Most characters from the begin of a call to its arguments. What is longer is content."""

Ending = Literal["complete", "truncated", "malformed"]
"""Of a call. Complete: its arguments are a JSON object. Truncated: the output ended before it did. Malformed: its
arguments break off; what the model wrote behind them is content."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments, an object. None: any object."""
    strict: bool = False
    """Arguments must fit `parameters`; otherwise a grammar asks for an object only. The server binds tools that are
    strict in a request, and all tools where a call is required or named."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    """Perhaps of no tool: the host decides what becomes of it."""
    arguments: str
    """JSON text of an object; of a call that is not complete, the part that came."""
    call_id: str = ""
    """As the model wrote it, in dialects that write ids; empty where it wrote none, and the host makes one."""
    ending: Ending = "complete"


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """What an assistant said in one turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Which tools may or must be called."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    """Auto: the model decides. None: no call is looked for. Required: one call at least. Named: one of `name`."""
    name: str = ""
    parallel: bool = True
    """Several calls in one message are allowed."""
    allowed: frozenset[str] = frozenset()
    """Of the request's tools, those that may be called; empty: all. The prompt shows the others too."""


@dataclass(frozen=True, kw_only=True)
class DialectRequest:
    """What is asked of one completion."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: str | None = None
    """What the content must match, as an expression of the language of `Dialect.grammar`: `%json {...}` with a JSON
    schema, `/[a-z]+/`. A message has such content or calls, not both."""
    reasoning: bool = True
    """The model may reason. A grammar of a request without it leaves no room for any; a parser reports what comes."""
    prompt_tail: str = ""
    """The rendered prompt behind the last whole message: the generation prompt, and the assistant's text where one is
    to be continued. Templates may open the reasoning there, or open and close it."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Indices count from 0; no other call begins, and no text comes, before its `CallEnd`."""

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are over."""

    index: int
    ending: Ending = "complete"


Event = TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd


def message_of(events: Iterable[Event]) -> AssistantMessage:
    """The message that a parser's events amount to; calls that are not complete are in it, with their ending."""
    texts: dict[type, list[str]] = {TextDelta: [], ReasoningDelta: []}
    begins: list[CallBegin] = []
    arguments: list[list[str]] = []
    endings: dict[int, Ending] = {}
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta):
            texts[type(event)].append(event.text)
        elif isinstance(event, CallBegin):
            begins.append(event)
            arguments.append([])
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index].append(event.text)
        else:
            endings[event.index] = event.ending
    calls = tuple(
        ToolCall(
            name=begin.name,
            arguments="".join(arguments[begin.index]),
            call_id=begin.call_id,
            ending=endings.get(begin.index, "truncated"),
        )
        for begin in begins
    )
    return AssistantMessage(reasoning="".join(texts[ReasoningDelta]), content="".join(texts[TextDelta]), calls=calls)


@dataclass(frozen=True, kw_only=True)
class DialectCapabilities:
    """What a dialect can express."""

    tools: bool = False
    parallel_calls: bool = False
    """Several calls in one message."""
    reasoning: bool = False
    grammars: bool = field(default=False, metadata=backed_by("grammar"))
    """`grammar` keeps the model to a tool choice, to strict tools and to a response format."""
    call_ids: bool = False
    """Calls may carry ids of the model's own."""
    markers_in_arguments: bool = False
    """Strings in arguments may contain the dialect's markers, and come back whole."""


def _unless(has: bool, asked: bool) -> bool | None:
    return True if asked and not has else None


@dataclass(frozen=True, kw_only=True)
class DialectNeed:
    """What the config asks of a dialect, and facts about the model; the argument of `check`."""

    tools: bool = field(
        metadata=compared(
            "tools", _unless, "{name} has no tool calls, and tools are asked for: choose another dialect."
        )
    )
    reasoning: bool = field(
        metadata=compared(
            "reasoning", _unless, "{name} knows no reasoning, and it is to be separated: choose another dialect."
        )
    )
    grammars: bool = field(
        metadata=compared(
            "grammars",
            _unless,
            "{name} writes no grammars, and strict tools, required calls or response formats are asked for: choose "
            "another dialect.",
        )
    )
    is_named: bool = field(
        metadata=informs("a dialect that the user names serves any model; under `auto` `check` asks for signs of it")
    )
    chat_template: str | None = field(metadata=informs("`check` looks for the dialect's markers"))
    """Source of the model's own template."""
    special_tokens: frozenset[str] = field(metadata=informs("`check` looks for the dialect's markers"))
    """Texts of the tokenizer's added tokens, those included that decoding does not skip."""
    architecture: str = field(metadata=informs("`check` may go by it"))
    """First of `architectures` in config.json; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class DialectSetup:
    """What a dialect is created with."""

    name: str = "unnamed"
    """As the config names it, for messages."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokenizer's added tokens by text, those included that decoding does not skip. A grammar names a marker
    among them by its id; all other markers are plain text to it."""
    chat_template: str = ""
    """Source of the model's own templates, one behind the other; empty where it has none."""


class DialectParser(ABC):
    """Reads one completion."""

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """What follows from the next piece of text, of any length. It has the `kept_tokens` in it as text. Never raises
        for what a model writes."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The output is over, for whatever reason: what was held back, and the end of a call that is not complete.
        Called once; nothing is pushed afterwards."""


class Dialect(Plugin):
    """How one family of models writes. Its methods change nothing in it, and may be called from several threads."""

    capabilities: ClassVar[DialectCapabilities] = DialectCapabilities()

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that begin, separate or end reasoning and calls."""

    reasoning_markers: ClassVar[tuple[str, str] | None] = None
    """What `render_message` writes before and behind reasoning, line breaks included. Where a prompt's tail has the
    first and not the second behind it (white space aside), the completion begins within reasoning."""

    stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that end a turn besides the model's own ends of sequence, where the tokenizer has them."""

    def __init__(self, options: PluginOptions, setup: DialectSetup):
        self.options = options
        self.setup = setup

    @property
    def kept_tokens(self) -> frozenset[str]:
        """The added tokens that decoding must not skip."""
        return frozenset(self.markers) & frozenset(self.setup.special_tokens)

    @property
    def may_reason(self) -> bool:
        """Whether the model's chat template, or its added tokens, have the marker that ends reasoning. A model that
        has it nowhere was not trained to reason, and a grammar that leaves room for it would lead it there."""
        if self.reasoning_markers is None:
            return False
        closing = self.reasoning_markers[1].strip()
        return closing in self.setup.chat_template or closing in self.setup.special_tokens

    @abstractmethod
    def parser(self, request: DialectRequest) -> DialectParser:
        """A parser of one completion of a request that `validate` accepts."""

    def grammar(self, request: DialectRequest) -> str | None:
        """A grammar of all that may follow the prompt, ends of sequence excluded; None where the request leaves the
        model free. For dialects with the capability `grammars`.

        Its language is what llguidance and xgrammar share of Lark: rules, strings, regular expressions, `%json`, token
        ids as `<[5]>`; no lookaround, no `&` and `~`, no lazy rules. Lexers are greedy: a terminal of free text has the
        marker that ends it within. Raises `RequestError` for a strict tool whose schema the dialect cannot keep to.
        """
        return None

    @abstractmethod
    def render_message(self, message: AssistantMessage) -> str:
        """The text that the model is expected to write, from the end of the prompt to the end of its turn, where the
        prompt opens no reasoning. Content comes before calls."""

    def validate(self, request: DialectRequest) -> None:
        """Raises `RequestError` for a request that the capabilities do not cover, or that contradicts itself."""
        name, can, choice = f"dialect {self.setup.name}", self.capabilities, request.choice
        names = {tool.name for tool in request.tools}
        asks_for_calls = choice.mode in ("required", "named")
        if request.tools and choice.mode != "none" and not can.tools:
            raise RequestError(
                f"{name} has no tool calls: leave tools out, or name the dialect that the model writes in the config "
                "(dialect: NAME; `dovetail plugins list` has the names)"
            )
        if asks_for_calls and not names:
            raise RequestError(f"tool_choice {choice.mode} needs tools, and the request has none")
        if choice.mode == "named" and choice.name not in names:
            raise RequestError(f"tool_choice names {choice.name!r}, and the tools are {', '.join(sorted(names))}")
        if len(names) < len(request.tools):
            raise RequestError("two tools have one name: give each its own")
        unknown = sorted(choice.allowed - names)
        if unknown:
            raise RequestError(f"tool_choice allows {unknown[0]!r}, and the tools are {', '.join(sorted(names))}")
        is_strict = choice.mode != "none" and any(tool.strict for tool in request.tools)
        is_single = bool(names) and choice.mode != "none" and not choice.parallel
        is_bound = asks_for_calls or is_strict or is_single or choice.allowed or request.response_format is not None
        if is_bound and not can.grammars:
            raise RequestError(
                f"{name} writes no grammars: it serves tool_choice auto of all tools, with parallel calls, tools that "
                "are not strict, and no response format"
            )
