import numpy as np
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.contracts.plugin import Plugin, PluginOptions
from numpy.typing import NDArray
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    source_bytes: int = 2 ** 20
    compile_seconds: float = 10.0
    compile_bytes: int = 2 ** 30


@dataclass(frozen=True, kw_only=True)
class GrammarSetup:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str | None
    limits: GrammarLimits = field(default_factory=GrammarLimits)


@dataclass(frozen=True, kw_only=True)
class GrammarCapabilities:
    forms: frozenset[str] = frozenset()
    json_keywords: frozenset[str] = frozenset()
    json_formats: frozenset[str] = frozenset()
    canonical: bool = False
    forced: bool = False
    without_tokenizer_json: bool = False


@dataclass(frozen=True, kw_only=True)
class GrammarNeed:
    vocab_size: int
    has_tokenizer_json: bool


class Matcher(ABC):
    @abstractmethod
    def fill_mask(self, row: NDArray[np.int32]) -> None: ...
    @abstractmethod
    def advance(self, token_ids: Sequence[int] | np.ndarray) -> int: ...
    @abstractmethod
    def rollback(self, num_tokens: int) -> None: ...
    @abstractmethod
    def legal_prefix(self, token_ids: Sequence[int] | np.ndarray) -> int: ...
    @abstractmethod
    def forced(self) -> tuple[int, ...]: ...
    @property
    @abstractmethod
    def may_end(self) -> bool: ...
    @property
    @abstractmethod
    def is_done(self) -> bool: ...


class CompiledGrammar(ABC):
    @abstractmethod
    def start(self) -> Matcher: ...


class Grammar(Plugin):
    capabilities: ClassVar[GrammarCapabilities] = GrammarCapabilities()
    def __init__(self, options: PluginOptions, setup: GrammarSetup): ...
    options: PluginOptions
    setup: GrammarSetup
    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar: ...
    def close(self) -> None: ...
