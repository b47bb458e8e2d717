"""Grammars by llguidance: Earley parsing over lexemes whose automata are built while they are used.

Compiling is cheap; masks cost some tens of microseconds, and more where a lexeme is new.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarCapabilities, GrammarSetup
from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec
from dovetail.plugins.grammars.bounds import move_bounds
from dovetail.plugins.grammars.ends import NO_WAY_ON, Automaton, EndingMatcher, Ends
from dovetail.plugins.grammars.patterns import read_pattern, repeats_in_rules
from dovetail.plugins.grammars.rehearsal import RehearsalOptions, RehearsedGrammar
from dovetail.plugins.grammars.schemas import Vocabulary, read_schema
from dovetail.plugins.grammars.special import SpecialTokens, choices_of

VOCABULARY = Vocabulary(
    keywords=frozenset(
        {
            *("anyOf", "oneOf", "allOf", "$ref", "const", "enum", "type"),
            *("items", "additionalItems", "prefixItems", "minItems", "maxItems"),
            *("properties", "additionalProperties", "patternProperties", "required", "minProperties", "maxProperties"),
            *("minLength", "maxLength", "pattern", "format"),
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        }
    ),
    formats=frozenset(
        {
            *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
        }
    ),
)
_FAR = 1000
"""Counts up to here take no time worth speaking of."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]"
_TEXT = r"/(.|\n)*/"


class LLGuidanceOptions(RehearsalOptions):
    """Bounds of the library, in its own units: they hold while masks are filled."""

    max_lexer_states: int = Field(default=50_000, ge=1000)
    """Of one matcher, each some 2 KB; where they do not suffice, the sequence fails."""
    step_fuel: int = Field(default=1_000_000, ge=10_000)
    """Of the lexer for one mask; about 14,000 take a millisecond."""
    step_items: int = Field(default=100_000, ge=1000)
    """Of the parser for one mask; about 20,000 take a millisecond."""


class LLGuidanceGrammar(RehearsedGrammar):
    """All forms; sound for every JSON Schema that it compiles, but for keys that occur twice."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options = LLGuidanceOptions
    options: LLGuidanceOptions
    preference: ClassVar[int] = 5
    stability = "provisional"
    capabilities: ClassVar[GrammarCapabilities] = GrammarCapabilities(
        forms=frozenset({"json_schema", "json_object", "regex", "choice", "lark", "gbnf", STRUCTURAL_TAG}),
        json_keywords=VOCABULARY.keywords,
        json_formats=VOCABULARY.formats,
        canonical=True,
        forced=True,
    )

    def __init__(self, options: LLGuidanceOptions, setup: GrammarSetup):
        super().__init__(options, setup)
        assert setup.tokenizer_json is not None  # as declared
        self._special = SpecialTokens(setup.tokenizer_json)
        self._ends = Ends(setup)
        self._tokenizer = _read_tokenizer(setup.tokenizer_json, setup)
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=options.max_lexer_states,
            step_lexer_fuel=options.step_fuel,
            step_max_items=options.step_items,
            verbose_errors=False,
        )

    def counts_far(self, spec: GrammarSpec) -> bool:
        """As `RehearsedGrammar.counts_far`."""
        if spec.form == "json_schema":
            return read_schema(spec.source, VOCABULARY)[1].largest > _FAR
        if spec.form == "regex":
            return read_pattern(spec.source).repeats > _FAR
        if spec.form in ("lark", "gbnf"):
            return "%" in spec.source or repeats_in_rules(spec.source) > _FAR
        return any(self.counts_far(tag.content) for tag in spec.tags)

    def compile_here(self, spec: GrammarSpec) -> CompiledGrammar:
        """As `RehearsedGrammar.compile_here`."""
        first = llguidance.LLMatcher(self._tokenizer, self._text(spec), log_level=0, limits=self._limits)
        _raise_error(first)
        compiled = _Compiled(first, self._ends, self._tokenizer.vocab_size)
        compiled.start().fill_mask(np.empty(self._ends.row_size, np.int32))
        return compiled

    def _text(self, spec: GrammarSpec) -> str:
        """The grammar as the library takes it: a list of grammars in JSON, or one in its notation of Lark."""
        if spec.form != STRUCTURAL_TAG:
            return json.dumps({"grammars": [self._part(spec, "top")]})
        tags = [{"name": "top", "lark_grammar": self._lark_of_tags(spec)}]
        return json.dumps({"grammars": tags + [self._part(tag.content, f"t{i}") for i, tag in enumerate(spec.tags)]})

    def _part(self, spec: GrammarSpec, name: str) -> dict[str, Any]:
        if spec.form == "json_schema":
            schema = read_schema(spec.source, VOCABULARY)[0]
            move_bounds(schema)
            return {"name": name, "json_schema": _with_whitespace(schema, spec)}
        if spec.form == "json_object":
            return {"name": name, "json_schema": _with_whitespace({"type": "object"}, spec)}
        return {"name": name, "lark_grammar": _lark(spec)}

    def _lark_of_tags(self, spec: GrammarSpec) -> str:
        any_tag = " | ".join(f"tag_{i}" for i in range(len(spec.tags)))
        repeated = f"({any_tag})" + ("" if spec.stop_after_first else "+" if spec.at_least_one else "*")
        free = "" if spec.stop_after_first else " rest"
        start = f"{repeated}{free}"
        if spec.stop_after_first and not spec.at_least_one:
            start += " | rest"
        lines = [f"start: {start}", "rest: TEXT", f"TEXT: {_TEXT}"]
        for index, trigger in enumerate(spec.triggers):
            lines += self._trigger(index, trigger)
        for index, tag in enumerate(spec.tags):
            trigger = next(trigger for trigger in spec.triggers if tag.begin.startswith(trigger))
            begin = self._literals(tag.begin[len(trigger) :])
            parts = [f"trigger_{spec.triggers.index(trigger)}", *begin, f"@t{index}", *self._literals(tag.end)]
            lines.append(f"tag_{index}: {' '.join(parts)}")
        return "%llguidance {}\n" + "\n".join(lines) + "\n"

    def _trigger(self, index: int, trigger: str) -> list[str]:
        """Free text, and the trigger at its end: the first that there is."""
        first, *others = self._literals(trigger)
        if first.startswith("<"):
            return [f"trigger_{index}: TEXT {' '.join([first, *others])}"]
        return [f"text_{index}[lazy]: TEXT {first}", f"trigger_{index}: {' '.join([f'text_{index}', *others])}"]

    def _literals(self, text: str) -> list[str]:
        pieces = self._special.pieces(text)
        return [f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece) for piece in pieces]


def _lark(spec: GrammarSpec) -> str:
    if spec.form == "regex":
        return f"start: /{llguidance.regex_to_lark(read_pattern(spec.source).text, 'dws')}/"
    if spec.form == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, choices_of(spec.source)))
    if spec.form == "gbnf":
        try:
            return str(any_to_lark(spec.source))
        except Exception as error:  # whatever the converter stumbles over
            raise RequestError(f"the grammar is no GBNF: {error}") from None
    return _read_lark(spec.source)


def _read_lark(source: str) -> str:
    """Raises `RequestError` for what the library would pass over in silence. Bounds in schemas move, see bounds.py."""
    if found := re.search(r"\[[^]\"/\n]*\btemperature\b[^]\n]*\]", source):
        raise RequestError(f"{found[0]} in a grammar changes no temperature: give the request's own")
    pieces, done = [], 0
    for found in re.finditer(r"%json\s*(?=[{t])", source):
        try:
            given, end = json.JSONDecoder().raw_decode(source, found.end())
        except ValueError as error:
            raise RequestError(f"the schema behind %json is not JSON: {error}") from None
        schema = read_schema(json.dumps(given), VOCABULARY)[0]
        if move_bounds(schema):
            pieces += [source[done : found.end()], json.dumps(schema)]
            done = end
    return "".join([*pieces, source[done:]])


def _with_whitespace(schema: Any, spec: GrammarSpec) -> Any:
    if spec.max_whitespace is None or schema is False:
        return schema
    options: dict[str, object] = {"whitespace_flexible": False}
    if spec.max_whitespace:
        options = {"whitespace_pattern": f"{_WHITESPACE}{{1,{spec.max_whitespace}}}"}
    return {**({} if schema is True else schema), "x-guidance": options}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read_tokenizer(source: str, setup: GrammarSetup) -> Any:
    size = Tokenizer.from_str(source).get_vocab_size(with_added_tokens=True)
    most = max(size, setup.vocab_size)
    try:
        return llguidance.LLTokenizer(source, n_vocab=most, eos_token=list(setup.eos_token_ids))
    except ValueError as error:
        raise RequestError(f"llguidance cannot read the model's tokenizer: {error}") from None


def _raise_error(matcher: Any) -> None:
    if not matcher.is_error():
        return
    message = matcher.get_error()
    # Of a schema behind %json the library shows the grammar around it, which may be a dialect's, and nobody's text.
    reason = message.partition("failed to compile JSON schema: ")[2].partition("\n")[0]
    if reason:
        raise RequestError(f"the schema cannot be used: {reason[:500]}")
    raise RequestError(f"the grammar cannot be used: {_short(message)}")


def _dead_end(message: str) -> RequestError:
    if message.startswith("NoExtension"):
        return RequestError(NO_WAY_ON)
    return RequestError(f"the grammar takes more to follow than is allowed: {_short(message)}")


def _short(message: str) -> str:
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines() if line.strip()]
    return "; ".join(lines)[:500]


class _Compiled(CompiledGrammar):
    """Copies of a matcher that has taken nothing: it stays as it is."""

    def __init__(self, first: Any, ends: Ends, width: int):
        self._first = first
        self._ends = ends
        self._width = width
        # The library notices that nothing can follow when a token is taken, so not in front of the first.
        row = np.empty(-(-width // 32), np.int32)
        matcher = first.deep_copy()
        is_complete = matcher.is_accepting()
        if is_complete:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._is_empty = is_complete and not (row[: ends.row_size] & ends.others).any()

    def start(self) -> EndingMatcher:
        """As `CompiledGrammar.start`."""
        return EndingMatcher(_LLGuidanceAutomaton(self._first.deep_copy(), self._width, self._is_empty), self._ends)


class _LLGuidanceAutomaton(Automaton):
    def __init__(self, matcher: Any, width: int, is_empty: bool):
        self._matcher = matcher
        self._own_row_size = -(-width // 32)
        self._is_empty = is_empty
        self._forced: tuple[int, ...] | None = None
        """None: not asked since the last token."""

    def fill(self, row: NDArray[np.int32]) -> None:
        # The mask is that of the forced token where there is one, and the library keeps what it found of it.
        self.forced()
        own = row if len(row) == self._own_row_size else np.empty(self._own_row_size, np.int32)
        try:
            self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        except ValueError as error:
            raise _dead_end(str(error)) from None
        if own is not row:
            row[:] = own[: len(row)]

    def take(self, token_id: int) -> bool:
        # The library would take other tokenizations of a forced text, which its mask rules out.
        if (forced := self.forced()) and token_id != forced[0]:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 0:
            _raise_error(self._matcher)
            return False
        self._forced = None
        return True

    def undo(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._forced = None

    def forced(self) -> tuple[int, ...]:
        if self._forced is None:
            self._forced = tuple(self._matcher.compute_ff_tokens())
        return self._forced

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_stuck(self) -> bool:
        return self._is_empty or (self._matcher.is_stopped() and self.is_complete())
