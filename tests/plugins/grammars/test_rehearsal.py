"""Compilation within bounds: the helper process, and when it is asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarLimits, GrammarSetup
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.plugins.grammars.llguidance import LLGuidanceGrammar
from dovetail.testing.grammar_cases import byte_vocabulary

LONG = GrammarSpec(form="json_schema", source='{"type": "integer", "multipleOf": 1000003}')
FAR = GrammarSpec(form="regex", source="a{2000}")
NEAR = GrammarSpec(form="regex", source="a{20}")


def create(**limits: float) -> LLGuidanceGrammar:
    vocabulary = byte_vocabulary()
    setup = GrammarSetup(
        vocab_size=vocabulary.vocab_size,
        eos_token_ids=vocabulary.end_ids,
        tokenizer_json=vocabulary.tokenizer_json,
        limits=GrammarLimits(**limits),
    )
    return LLGuidanceGrammar(LLGuidanceGrammar.Options(), setup)


@pytest.fixture
def grammar() -> Iterator[LLGuidanceGrammar]:
    made = create(compile_seconds=60.0)
    yield made
    made.close()


def helper_of(grammar: LLGuidanceGrammar) -> int | None:
    return None if grammar._helper is None else grammar._helper._process.pid


def test_small_specs_need_no_helper(grammar: LLGuidanceGrammar) -> None:
    grammar.compile(NEAR)
    assert helper_of(grammar) is None


def test_a_helper_serves_one_spec_after_the_other_and_ends_with_the_grammar(grammar: LLGuidanceGrammar) -> None:
    grammar.compile(FAR)
    first = helper_of(grammar)
    assert first is not None
    with pytest.raises(RequestError, match="cannot be used"):
        grammar.compile(GrammarSpec(form="lark", source="start: nothing%"))
    grammar.compile(FAR)
    assert helper_of(grammar) == first
    grammar.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_what_takes_too_long_is_stopped_and_the_next_compiles(grammar: LLGuidanceGrammar) -> None:
    ample = grammar.setup
    grammar.setup = replace(ample, limits=GrammarLimits(compile_seconds=1.0))
    with pytest.raises(RequestError, match="more than 1 seconds"):
        grammar.compile(LONG)
    assert helper_of(grammar) is None
    grammar.setup = ample
    grammar.compile(FAR)


def test_what_takes_too_much_memory_is_refused() -> None:
    grammar = create(compile_seconds=60.0, compile_bytes=2**25)
    with pytest.raises(RequestError, match="more than 33554432 bytes"):
        grammar.compile(LONG)
    grammar.close()


def test_a_helper_that_was_killed_is_replaced(grammar: LLGuidanceGrammar) -> None:
    grammar.compile(FAR)
    helper = grammar._helper
    assert helper is not None
    helper._process.send_signal(signal.SIGKILL)
    helper._process.wait()
    grammar.compile(FAR)
    assert helper_of(grammar) not in (None, helper._process.pid)
