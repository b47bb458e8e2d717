from abc import ABC, abstractmethod
from collections.abc import Sequence
from dovetail.contracts.dialect import DialectRequest, DialectSetup, Tool
from dovetail.plugins.dialects.lark import Writer


class CallGrammar(ABC):
    marker: str
    @abstractmethod
    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str: ...
    def calls_alone(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str: ...
    def free_text(self, others: Sequence[str]) -> str: ...

def write_grammar(
    request: DialectRequest,
    setup: DialectSetup,
    think: tuple[str, str] | None,
    syntax: CallGrammar,
) -> str | None: ...
