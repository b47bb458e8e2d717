import pytest
from collections.abc import Callable, Iterator, Mapping
from dovetail.contracts.grammar import Grammar, GrammarLimits
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.testing.grammar_cases import Vocabulary
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

BOMB_LIMITS = GrammarLimits(source_bytes=2 ** 24, compile_seconds=3.0, compile_bytes=2 ** 29)

class GrammarForms(PluginSuite):
    kind: ClassVar[str] = 'grammar'
    plugin: ClassVar[type[Grammar]]
    options: ClassVar[Mapping[str, Any]] = {}
    samples: ClassVar[Mapping[str, GrammarSpec]] = {}
    hang_s: ClassVar[float] = 120.0
    def vocabulary(self, request: pytest.FixtureRequest) -> Vocabulary: ...
    def create(self) -> Iterator[Callable[..., Grammar]]: ...
    def specs(self) -> dict[str, GrammarSpec]: ...
    def needs(self, *forms: str) -> None: ...
