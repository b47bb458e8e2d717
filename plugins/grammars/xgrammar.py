"""Grammars by xgrammar: pushdown automata with masks that are computed ahead. An extra: dovetail[xgrammar].

What it serves of JSON Schema is in `fragment`; the rest is refused.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, GrammarCapabilities, GrammarNeed, GrammarSetup
from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec
from dovetail.contracts.plugin import Environment
from dovetail.plugins.grammars.ends import Automaton, EndingMatcher, Ends
from dovetail.plugins.grammars.fragment import VOCABULARY, check_fragment
from dovetail.plugins.grammars.patterns import read_pattern, repeats_in_rules
from dovetail.plugins.grammars.rehearsal import RehearsalOptions, RehearsedGrammar
from dovetail.plugins.grammars.schemas import read_schema
from dovetail.plugins.grammars.special import SpecialTokens, choices_of

if TYPE_CHECKING:
    import xgrammar

_SURROGATES = r"\ud800-\udfff"
"""Code points that no UTF-8 has, and that the library's classes have all the same."""
_FAR = 100
_MOST_FORCED = 64
"""Tokens: a forced text that is longer is cut, since finding it again costs as much at every step."""


class XGrammar(RehearsedGrammar):
    """A part of JSON Schema, regular expressions, choices, GBNF and structural tags."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    options: RehearsalOptions
    stability = "provisional"
    capabilities: ClassVar[GrammarCapabilities] = GrammarCapabilities(
        forms=frozenset({"json_schema", "json_object", "regex", "choice", "gbnf", STRUCTURAL_TAG}),
        json_keywords=VOCABULARY.keywords,
        json_formats=VOCABULARY.formats,
        forced=True,
    )

    @classmethod
    def check(cls, need: GrammarNeed, options: Any, environment: Environment) -> list[str]:
        """The library must be there; importing it would take seconds."""
        missing = [name for name in ("xgrammar", "tvm_ffi") if find_spec(name) is None]
        return [f"{' and '.join(missing)} cannot be found: pip install 'dovetail[xgrammar]'."] if missing else []

    def __init__(self, options: RehearsalOptions, setup: GrammarSetup):
        super().__init__(options, setup)
        # It imports transformers, which takes seconds.
        import xgrammar

        assert setup.tokenizer_json is not None  # as declared
        self._special = SpecialTokens(setup.tokenizer_json)
        self._ends = Ends(setup)
        self._tokenizer: Tokenizer = Tokenizer.from_str(setup.tokenizer_json)
        vocabulary = _read_vocabulary(self._tokenizer, self._special, setup)
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def counts_far(self, spec: GrammarSpec) -> bool:
        """As `RehearsedGrammar.counts_far`."""
        if spec.form == "json_schema":
            return read_schema(spec.source, VOCABULARY)[1].largest > _FAR
        if spec.form == "regex":
            return read_pattern(spec.source).repeats > _FAR
        if spec.form == "gbnf":
            return repeats_in_rules(spec.source) > _FAR
        return any(self.counts_far(tag.content) for tag in spec.tags)

    def compile_here(self, spec: GrammarSpec) -> CompiledGrammar:
        """As `RehearsedGrammar.compile_here`."""
        try:
            compiled = self._compiler.compile_grammar(self._grammar(spec))
        except RequestError:
            raise
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"the grammar cannot be used: {_short(str(error))}") from None
        found = _Compiled(compiled, self._ends, self._tokenizer)
        found.start().fill_mask(np.empty(self._ends.row_size, np.int32))
        return found

    def _grammar(self, spec: GrammarSpec) -> Any:
        from xgrammar import Grammar

        if spec.form in ("json_schema", "json_object"):
            schema = self._schema(spec.source) if spec.form == "json_schema" else {"type": "object"}
            bounds: dict[str, Any] = {"any_whitespace": spec.max_whitespace != 0, "separators": (",", ":")}
            if spec.max_whitespace:
                bounds["max_whitespace_cnt"] = spec.max_whitespace
            return Grammar.from_json_schema(json.dumps(schema), strict_mode=False, **bounds)
        if spec.form == "regex":
            return Grammar.from_regex(read_pattern(spec.source, _SURROGATES).text)
        if spec.form == "choice":
            return Grammar.from_ebnf("root ::= " + " | ".join(map(_quoted, choices_of(spec.source))))
        if spec.form == "gbnf":
            return Grammar.from_ebnf(spec.source)
        return Grammar.from_structural_tag({"type": "structural_tag", "format": self._tags(spec)})

    def _tags(self, spec: GrammarSpec) -> dict[str, Any]:
        for text in (*spec.triggers, *(text for tag in spec.tags for text in (tag.begin, tag.end))):
            if any(isinstance(piece, int) for piece in self._special.pieces(text)):
                raise RequestError(f"{text!r} has a special token, which the tags of XGrammar cannot: use llguidance")
        tags = [
            {
                "type": "tag",
                "begin": tag.begin,
                "content": {"type": "grammar", "grammar": str(self._grammar(tag.content))},
                "end": tag.end,
            }
            for tag in spec.tags
        ]
        triggered = {
            "type": "triggered_tags",
            "triggers": list(spec.triggers),
            "tags": tags,
            "at_least_one": spec.at_least_one,
            "stop_after_first": spec.stop_after_first,
        }
        if not spec.at_least_one:
            return triggered
        # The library has the first of them at once, without free text before it.
        before = {"type": "any_text", "excludes": list(spec.triggers)}
        return {"type": "sequence", "elements": [before, triggered]}

    def _schema(self, source: str) -> Any:
        schema = read_schema(source, VOCABULARY)[0]
        check_fragment(schema)
        return schema


def _quoted(text: str) -> str:
    """As a literal of the library's notation, in which every character may be written by its number."""
    return '"' + "".join(char if char.isalnum() and char.isascii() else f"\\U{ord(char):08x}" for char in text) + '"'


def _read_vocabulary(tokenizer: Tokenizer, special: SpecialTokens, setup: GrammarSetup) -> Any:
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast  # which has no types
    wrapped = wrap(tokenizer_object=tokenizer)
    ends = list(setup.eos_token_ids)
    found = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=setup.vocab_size, stop_token_ids=ends)
    # Once more, with special tokens as tokens without text: their names are no text that an output may have.
    tokens = [""] * setup.vocab_size
    silent = {*special.by_name.values(), *ends}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < setup.vocab_size and token_id not in silent:
            tokens[token_id] = token
    return xgrammar.TokenizerInfo(
        tokens,
        found.vocab_type,
        vocab_size=setup.vocab_size,
        stop_token_ids=ends,
        add_prefix_space=found.add_prefix_space,
    )


def _short(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][-500:] if lines else "the library gives no reason"


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: xgrammar.CompiledGrammar, ends: Ends, tokenizer: Tokenizer):
        self._compiled = compiled
        self._ends = ends
        self._tokenizer = tokenizer

    def start(self) -> EndingMatcher:
        """As `CompiledGrammar.start`."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled)
        return EndingMatcher(_XGrammarAutomaton(matcher, self._ends, self._tokenizer), self._ends)


class _XGrammarAutomaton(Automaton):
    def __init__(self, matcher: Any, ends: Ends, tokenizer: Tokenizer):
        self._matcher = matcher
        self._ends = ends
        self._tokenizer = tokenizer

    def fill(self, row: NDArray[np.int32]) -> None:
        row[:] = -1  # where everything is legal, the library writes nothing
        self._matcher.fill_next_token_bitmask(torch.from_numpy(row).view(1, -1))

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def undo(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def forced(self) -> tuple[int, ...]:
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # it begins within a character
            return ()
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids[:_MOST_FORCED] if text else []
        for count, token_id in enumerate(tokens):
            if token_id in self._ends.token_ids or not self._matcher.accept_token(token_id):
                tokens = tokens[:count]
                break
        if tokens:
            self._matcher.rollback(len(tokens))
        return tuple(tokens)

    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def is_stuck(self) -> bool:
        if not self.is_complete():
            return False
        row = np.empty(self._ends.row_size, np.int32)
        self.fill(row)
        return not (row & self._ends.others).any()
