import pytest
from collections.abc import Mapping
from dovetail.contracts.dialect import AssistantMessage, Dialect, DialectParser, DialectRequest, Event
from dovetail.testing.dialect_cases import MessageMaker, TOOLS
from dovetail.testing.dialect_grammars import GrammarChecker
from dovetail.testing.suite import PluginSuite
from hypothesis import HealthCheck, Phase, settings, strategies as st
from random import Random
from typing import Any, ClassVar

REQUEST = DialectRequest(tools=TOOLS)
LONG = 'All work and no play makes Jack a dull boy. ' * 12
WALKS = 12
FORMAT = '%json {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}'
law = settings(max_examples=50, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
randoms = st.randoms(use_true_random=False)
as_tokens = pytest.mark.parametrize('special', [False, True], ids=['markers_are_text', 'markers_are_tokens'])

class DialectSuite(PluginSuite):
    kind: ClassVar[str] = 'dialect'
    plugin: ClassVar[type[Dialect]]
    options: ClassVar[Mapping[str, Any]] = {}
    def create(self, special: bool = True) -> Dialect: ...
    def maker(self, random: Random, special: bool = False) -> MessageMaker: ...
    def example(self, num_calls: int = 1) -> str: ...
    def opening(self) -> str: ...
    def fitting(self, choice: str, maker: MessageMaker) -> AssistantMessage: ...
    def checker(self, dialect: Dialect, request: DialectRequest) -> GrammarChecker: ...

def check_order(events: list[Event]) -> None: ...
def check_held(parser: DialectParser, text: str, most: int) -> None: ...
