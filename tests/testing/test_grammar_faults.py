"""What the suite of grammars finds: plugins with one fault each, over a plain one that passes and over llguidance."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarCapabilities, GrammarSetup, Matcher
from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.plugins.grammars.llguidance import LLGuidanceGrammar
from dovetail.testing import grammar_cases
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.grammar_suite import GrammarSuite


class Choosing(Matcher):
    """The sound matcher."""

    def __init__(self, compiled: Compiled):
        self.setup = compiled.setup
        self.spellings = compiled.spellings
        self.choices = compiled.choices
        self.taken: list[int] = []

    def rest(self) -> list[bytes]:
        text = b"".join(self.spellings[token] for token in self.taken)
        return [choice[len(text) :] for choice in self.choices if choice.startswith(text)]

    def ended(self) -> bool:
        return bool(self.taken) and self.taken[-1] in self.setup.eos_token_ids

    def is_legal(self, token: int) -> bool:
        if token in self.setup.eos_token_ids:
            return self.may_end
        if self.ended() or not 0 <= token < self.setup.vocab_size:
            return False
        spelling = self.spellings[token]
        return bool(spelling) and any(rest.startswith(spelling) for rest in self.rest())

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        flags = np.zeros(len(row) * 32, np.uint8)
        flags[[token for token in range(self.setup.vocab_size) if self.is_legal(token)]] = 1
        row[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def advance(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not self.is_legal(int(token)):
                return count
            self.taken.append(int(token))
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self.taken):
            raise ValueError(f"{num_tokens} of {len(self.taken)}")
        del self.taken[len(self.taken) - num_tokens :]

    def legal_prefix(self, token_ids: Sequence[int]) -> int:
        count = self.advance(token_ids)
        self.rollback(count)
        return count

    def forced(self) -> tuple[int, ...]:
        rest, common = self.rest(), b""
        while not self.ended() and common not in rest and len({one[: len(common) + 1] for one in rest}) == 1:
            common = rest[0][: len(common) + 1]
        return tuple(self.spellings.index(common[at : at + 1]) for at in range(len(common)))

    @property
    def may_end(self) -> bool:
        return b"" in self.rest()

    @property
    def is_done(self) -> bool:
        return self.ended() or set(self.rest()) == {b""}


class Compiled(CompiledGrammar):
    def __init__(self, setup: GrammarSetup, spellings: list[bytes], choices: list[bytes], matcher: type[Choosing]):
        self.setup, self.spellings, self.choices = setup, spellings, choices
        self._matcher = matcher

    def start(self) -> Matcher:
        return self._matcher(self)


class Choices(Grammar):
    """The sound plugin: choices alone."""

    contract = (1, 0)
    capabilities = GrammarCapabilities(forms=frozenset({"choice"}), forced=True)
    matcher: type[Choosing] = Choosing
    compiled: type[Compiled] = Compiled

    def __init__(self, options: PluginOptions, setup: GrammarSetup):
        super().__init__(options, setup)
        self.spellings = self.spell()

    def spell(self) -> list[bytes]:
        assert self.setup.tokenizer_json is not None
        made = (make() for make in grammar_cases.VOCABULARIES.values())
        vocabulary = next(one for one in made if one.tokenizer_json == self.setup.tokenizer_json)
        ends = self.setup.eos_token_ids
        return [b"" if i in ends else text or b"" for i, text in enumerate(vocabulary.token_bytes)]

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form != "choice":
            raise RequestError(f"choices only, not {spec.form}")
        self.check_size(spec)
        choices = self.read(spec.source)
        return self.compiled(self.setup, self.spellings, choices, self.matcher)

    def check_size(self, spec: GrammarSpec) -> None:
        if len(spec.source.encode()) > self.setup.limits.source_bytes:
            raise RequestError("too long")

    def read(self, source: str) -> list[bytes]:
        try:
            choices = json.loads(source)
        except ValueError as error:
            raise RequestError(f"no JSON: {error}") from None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise RequestError("no array of strings")
        if len(choices) > 1000:
            raise RequestError("too many choices")
        return [choice.encode() for choice in choices]


def choosing(kind: type[Choosing]) -> type[Choices]:
    """The sound plugin with another matcher."""
    return type(kind.__name__, (Choices,), {"matcher": kind})


class WritesBehindTheVocabulary(Choosing):
    def fill_mask(self, row: NDArray[np.int32]) -> None:
        super().fill_mask(row)
        row[-1] |= np.int32(-(2**31))


class AddsToTheRow(Choosing):
    def fill_mask(self, row: NDArray[np.int32]) -> None:
        before = row.copy()
        super().fill_mask(row)
        row |= before


class MasksLongTokens(Choosing):
    def fill_mask(self, row: NDArray[np.int32]) -> None:
        flags = np.zeros(len(row) * 32, np.uint8)
        short = [i for i in range(self.setup.vocab_size) if len(self.spellings[i]) < 2 and self.is_legal(i)]
        flags[short] = 1
        row[:] = np.packbits(flags, bitorder="little").view(np.int32)


class TakesAnything(Choosing):
    def advance(self, token_ids: Sequence[int]) -> int:
        self.taken += [int(token) for token in token_ids]
        return len(token_ids)


class RaisesForIllegalTokens(Choosing):
    def advance(self, token_ids: Sequence[int]) -> int:
        count = super().advance(token_ids)
        if count < len(token_ids):
            raise RequestError(f"{token_ids[count]} is not legal")
        return count


class TakesAllOrNothing(Choosing):
    def advance(self, token_ids: Sequence[int]) -> int:
        count = super().advance(token_ids)
        if count < len(token_ids):
            self.rollback(count)
            return 0
        return count


class KeepsTheRefusedToken(Choosing):
    def advance(self, token_ids: Sequence[int]) -> int:
        count = super().advance(token_ids)
        if count < len(token_ids) and 0 <= token_ids[count] < self.setup.vocab_size:
            self.taken.append(int(token_ids[count]))
        return count


class ForgetsEndsInRollback(Choosing):
    def rollback(self, num_tokens: int) -> None:
        ends = sum(token in self.setup.eos_token_ids for token in self.taken)
        super().rollback(num_tokens)
        if ends and num_tokens > 1 and self.taken:
            self.taken.pop()


class RollsBackWhatItHas(Choosing):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(max(0, min(num_tokens, len(self.taken))))


class MovesWhenItLooks(Choosing):
    def legal_prefix(self, token_ids: Sequence[int]) -> int:
        return self.advance(token_ids)


class ForcesItsFavourite(Choosing):
    def forced(self) -> tuple[int, ...]:
        rest = [one for one in self.rest() if one]
        if self.may_end or not rest:
            return ()
        return tuple(self.spellings.index(rest[0][at : at + 1]) for at in range(len(rest[0])))


class FindsNothingForced(Choosing):
    def forced(self) -> tuple[int, ...]:
        return ()


class MayAlwaysEnd(Choosing):
    def is_legal(self, token: int) -> bool:
        return token in self.setup.eos_token_ids or super().is_legal(token)


class KnowsOneEnd(Choosing):
    def is_legal(self, token: int) -> bool:
        return token not in self.setup.eos_token_ids[1:] and super().is_legal(token)


class GoesOnBehindTheEnd(Choosing):
    def ended(self) -> bool:
        return False


class IsNeverDone(Choosing):
    @property
    def is_done(self) -> bool:
        return False


class Rolls(Choosing):
    def fill_mask(self, row: NDArray[np.int32]) -> None:
        random.random()
        super().fill_mask(row)


class SpellsSpecialTokens(Choices):
    def spell(self) -> list[bytes]:
        tokenizer = Tokenizer.from_str(self.setup.tokenizer_json)
        spellings = super().spell()
        spellings[tokenizer.token_to_id(grammar_cases.CALL)] = grammar_cases.CALL.encode()
        return spellings


class _OneMatcher(Compiled):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._only = super().start()

    def start(self) -> Matcher:
        return self._only


class SharesOneMatcher(Choices):
    compiled = _OneMatcher


class TakesAnyForm(Choices):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return super().compile(GrammarSpec(form="choice", source=json.dumps([spec.source or "x"])))


class RaisesWhatPythonRaises(Choices):
    def read(self, source: str) -> list[bytes]:
        return [choice.encode() for choice in json.loads(source)]


class TakesAnySize(Choices):
    def check_size(self, spec: GrammarSpec) -> None:
        return None


class Hangs(Choices):
    def read(self, source: str) -> list[bytes]:
        if len(source) > 10**6:
            threading.Event().wait()
        return super().read(source)


class RunsOutOfMemory(Choices):
    def read(self, source: str) -> list[bytes]:
        if len(source) > 10**6:
            raise MemoryError
        return super().read(source)


class PassesOverKeywords(LLGuidanceGrammar):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form != "json_schema":
            return super().compile(spec)
        return super().compile(GrammarSpec(form=spec.form, source=json.dumps(self.kept(json.loads(spec.source)))))

    def kept(self, schema: Any) -> Any:
        if isinstance(schema, dict):
            return {key: self.kept(value) for key, value in schema.items() if not self.passes_over(key)}
        return [self.kept(one) for one in schema] if isinstance(schema, list) else schema

    def passes_over(self, key: str) -> bool:
        return key in ("maxLenght", "made up", "not", "if", "then", "else", "contains", "uniqueItems")


class PassesOverMinimum(PassesOverKeywords):
    def passes_over(self, key: str) -> bool:
        return key == "minimum"


class BoundsDecimals(LLGuidanceGrammar):
    def _part(self, spec: GrammarSpec, name: str) -> dict[str, Any]:
        part = super()._part(spec, name)
        return {**part, "json_schema": json.loads(spec.source)} if spec.form == "json_schema" else part


class SearchesForPatterns(LLGuidanceGrammar):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form == "regex":
            spec = GrammarSpec(form="regex", source=f"(?:{spec.source.strip('^$')}).*")
        return super().compile(spec)


class TakesListsForChoices(LLGuidanceGrammar):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return super().compile(replace(spec, form="choice") if spec.source.startswith('["') else spec)


class IgnoresWhitespaceBounds(LLGuidanceGrammar):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form == "json_schema":
            spec = GrammarSpec(form=spec.form, source=spec.source)
        return super().compile(spec)


class IgnoresTagCounts(LLGuidanceGrammar):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form == STRUCTURAL_TAG:
            spec = GrammarSpec(form=spec.form, tags=spec.tags, triggers=spec.triggers)
        return super().compile(spec)


class WritesTextForTags(LLGuidanceGrammar):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form == STRUCTURAL_TAG:
            spec = GrammarSpec(form="regex", source=r"(.|\n)*")
        return super().compile(spec)


ROW = "test_every_bit_of_a_row_is_written"
TAKES = "test_takes_what_is_legal_and_nothing_of_the_rest"
ENDS = "test_ends_where_it_may"
FORCED = "test_forced_tokens_are_what_must_follow"
BOMB = "test_explosions_end_in_a_refusal[100,000 choices]"

FAULTS = [
    Fault("sets bits behind the vocabulary", choosing(WritesBehindTheVocabulary), ROW),
    Fault("leaves what the row held", choosing(AddsToTheRow), ROW),
    Fault(
        "masks tokens of several bytes",
        choosing(MasksLongTokens),
        "test_the_mask_has_the_tokens_that_are_legal_one_by_one[bpe]",
    ),
    Fault("lets special tokens be text", SpellsSpecialTokens, "test_tokens_without_text_are_not_legal"),
    Fault("takes tokens that are not legal", choosing(TakesAnything), TAKES),
    Fault("raises for tokens that are not legal", choosing(RaisesForIllegalTokens), TAKES),
    Fault("takes all or nothing", choosing(TakesAllOrNothing), TAKES),
    Fault("remembers a token that it refused", choosing(KeepsTheRefusedToken), TAKES),
    Fault("takes back one more behind an end", choosing(ForgetsEndsInRollback), "test_rollback_restores_every_state"),
    Fault(
        "takes back as much as there is, and says nothing",
        choosing(RollsBackWhatItHas),
        "test_refuses_to_roll_back_what_was_not_taken",
    ),
    Fault("moves when it is asked", choosing(MovesWhenItLooks), "test_looking_changes_nothing"),
    Fault("forces what may be chosen", choosing(ForcesItsFavourite), FORCED),
    Fault("declares forced tokens and finds none", choosing(FindsNothingForced), FORCED),
    Fault("may end anywhere", choosing(MayAlwaysEnd), ENDS),
    Fault("knows one of two end tokens", choosing(KnowsOneEnd), ENDS),
    Fault("goes on behind an end token", choosing(GoesOnBehindTheEnd), ENDS),
    Fault("is never done", choosing(IsNeverDone), ENDS),
    Fault("draws random numbers", choosing(Rolls), "test_leaves_alone_what_is_not_its_own"),
    Fault("has one matcher for all", SharesOneMatcher, "test_matchers_of_one_grammar_do_not_disturb_each_other"),
    Fault("compiles what it does not declare", TakesAnyForm, "test_compiles_the_forms_that_it_declares_and_no_others"),
    Fault("raises what its library raises", RaisesWhatPythonRaises, "test_refuses_sources_that_are_wrong[choice]"),
    Fault("takes sources of any size", TakesAnySize, "test_refuses_sources_beyond_the_limit"),
    Fault("hangs", Hangs, BOMB),
    Fault("runs out of memory", RunsOutOfMemory, BOMB),
    Fault(
        "passes over keywords that nobody knows",
        PassesOverKeywords,
        "test_refuses_what_nobody_enforces_with_its_place",
    ),
    Fault("passes over keywords of others", PassesOverKeywords, "test_enforces_or_refuses_each_keyword[not]"),
    Fault("declares a keyword and drops it", PassesOverMinimum, "test_enforces_or_refuses_each_keyword[minimum]"),
    Fault(
        "bounds what is written, and not the float that is read",
        BoundsDecimals,
        "test_numbers_keep_to_their_bounds_as_floats[exclusiveMinimum]",
    ),
    Fault("takes text behind a match", SearchesForPatterns, "test_outputs_match_their_regular_expression"),
    Fault("goes by the looks of a source", TakesListsForChoices, "test_outputs_match_their_regular_expression"),
    Fault("bounds no whitespace", IgnoresWhitespaceBounds, "test_bounds_whitespace"),
    Fault("does not count tags", IgnoresTagCounts, "test_counts_tags"),
    Fault("lets tags be text", WritesTextForTags, "test_text_is_free_outside_of_tags_alone"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_grammar_that(fault: Fault) -> None:
    hang_s = 0.5 if fault.plugin is Hangs else GrammarSuite.hang_s
    check_fault(fault, GrammarSuite, plugin=fault.plugin, hang_s=hang_s)


class TestChoices(GrammarSuite):
    plugin = Choices
