from dataclasses import dataclass

STRUCTURAL_TAG = 'structural_tag'
FORMS = ...

@dataclass(frozen=True, kw_only=True)
class GrammarTag:
    begin: str
    content: GrammarSpec
    end: str


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    form: str
    source: str = ''
    max_whitespace: int | None = None
    tags: tuple[GrammarTag, ...] = ()
    triggers: tuple[str, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False
    @property
    def forms(self) -> frozenset[str]: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class OutputGrammar:
    spec: GrammarSpec
    starts_after: tuple[int, ...] = ()
