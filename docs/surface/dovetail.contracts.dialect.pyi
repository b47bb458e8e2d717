from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from dovetail.contracts.plugin import Plugin, PluginOptions
from typing import Any, ClassVar, Literal

MAX_HEAD = 512
Ending = Literal['complete', 'truncated', 'malformed']

@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    call_id: str = ''
    ending: Ending = 'complete'


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    reasoning: str = ''
    content: str = ''
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    mode: Literal['auto', 'none', 'required', 'named'] = 'auto'
    name: str = ''
    parallel: bool = True
    allowed: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class DialectRequest:
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    response_format: str | None = None
    reasoning: bool = True
    prompt_tail: str = ''


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    name: str
    call_id: str = ''


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    ending: Ending = 'complete'

Event = TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd
def message_of(events: Iterable[Event]) -> AssistantMessage: ...

@dataclass(frozen=True, kw_only=True)
class DialectCapabilities:
    tools: bool = False
    parallel_calls: bool = False
    reasoning: bool = False
    grammars: bool = False
    call_ids: bool = False
    markers_in_arguments: bool = False


@dataclass(frozen=True, kw_only=True)
class DialectNeed:
    tools: bool
    reasoning: bool
    grammars: bool
    is_named: bool
    chat_template: str | None
    special_tokens: frozenset[str]
    architecture: str


@dataclass(frozen=True, kw_only=True)
class DialectSetup:
    name: str = 'unnamed'
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    chat_template: str = ''


class DialectParser(ABC):
    @abstractmethod
    def push(self, text: str) -> list[Event]: ...
    @abstractmethod
    def finish(self) -> list[Event]: ...


class Dialect(Plugin):
    capabilities: ClassVar[DialectCapabilities] = DialectCapabilities()
    markers: ClassVar[tuple[str, ...]] = ()
    reasoning_markers: ClassVar[tuple[str, str] | None] = None
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    def __init__(self, options: PluginOptions, setup: DialectSetup): ...
    options: PluginOptions
    setup: DialectSetup
    @property
    def kept_tokens(self) -> frozenset[str]: ...
    @property
    def may_reason(self) -> bool: ...
    @abstractmethod
    def parser(self, request: DialectRequest) -> DialectParser: ...
    def grammar(self, request: DialectRequest) -> str | None: ...
    @abstractmethod
    def render_message(self, message: AssistantMessage) -> str: ...
    def validate(self, request: DialectRequest) -> None: ...
