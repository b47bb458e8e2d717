from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from dovetail.contracts.dialect import DialectParser, DialectRequest, Event
from dovetail.plugins.dialects.shapes import Shape


class ArgumentsReader(ABC):
    is_done = False
    is_broken = False
    @abstractmethod
    def read(self, text: str) -> tuple[str, int]: ...
    def flush(self, text: str) -> tuple[str, int]: ...


class JSONArguments(ArgumentsReader):
    def __init__(self, request: DialectRequest, name: str): ...
    def read(self, text: str) -> tuple[str, int]: ...
    def flush(self, text: str) -> tuple[str, int]: ...


@dataclass(frozen=True)
class CallSyntax:
    start: Shape
    end: Shape
    next: Shape | None = None
    arguments: Callable[[DialectRequest, str], ArgumentsReader] = JSONArguments
    is_argument: str = '{'


@dataclass(frozen=True)
class ThinkSyntax:
    open: str
    close: str
    open_shape: Shape
    close_shape: Shape
    def is_open(self, prompt_tail: str) -> bool: ...

def think_syntax(opening: str, closing: str) -> ThinkSyntax: ...

class TextParser(DialectParser):
    def __init__(
        self,
        request: DialectRequest,
        think: tuple[str, str] | None,
        calls: CallSyntax | None,
    ): ...
    def push(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...
