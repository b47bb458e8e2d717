"""Whatever a grammar lets a model spell as a number is within the bounds that the client checks, which has floats."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSetup
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.plugins.grammars.bounds import move_bounds
from dovetail.plugins.grammars.llguidance import LLGuidanceGrammar
from dovetail.testing.grammar_cases import byte_vocabulary

VOCABULARY = byte_vocabulary()
GRAMMAR = LLGuidanceGrammar(
    LLGuidanceGrammar.Options(),
    GrammarSetup(
        vocab_size=VOCABULARY.vocab_size,
        eos_token_ids=VOCABULARY.end_ids,
        tokenizer_json=VOCABULARY.tokenizer_json,
    ),
)
BOUNDS = (
    st.integers(-10_000, 10_000)
    | st.integers(-(10**6), 10**6).map(lambda n: n / 1000)
    | st.floats(-1000, 1000, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-9)
)


def takes(spec: GrammarSpec, text: str) -> bool:
    matcher = GRAMMAR.compile(spec).start()
    return matcher.advance(list(text.encode())) == len(text) and matcher.may_end


@example(low=-0.251, gap=0.5, names=(False, False))
@given(low=BOUNDS, gap=st.sampled_from([0.5, 1e-3, 100, 1e6]), names=st.tuples(st.booleans(), st.booleans()))
@settings(max_examples=60, deadline=None)
def test_what_is_spelled_is_within_bounds(low: float, gap: float, names: tuple[bool, bool]) -> None:
    schema = {
        "type": "number",
        "exclusiveMinimum" if names[0] else "minimum": low,
        "exclusiveMaximum" if names[1] else "maximum": low + gap,
    }
    validator = Draft202012Validator(schema)
    spec = GrammarSpec(form="json_schema", source=json.dumps(schema))
    try:
        GRAMMAR.compile(spec)
    except RequestError:  # nothing of twelve digits is between bounds that are so near
        assume(False)
    for bound in (low, low + gap):
        near = [math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf), bound]
        for text in [*(f"{value:.{digits}f}" for value in near for digits in (3, 17, 25)), f"{bound:.20f}1"]:
            if takes(spec, text):
                assert validator.is_valid(json.loads(text)), text
    # The library leaves out some spellings of numbers below 0, as "-0.0010" for "-0.001".
    assert any(takes(spec, f"{low + gap / 2:.{digits}f}") for digits in range(1, 13))


@pytest.mark.parametrize("form", ["json_schema", "lark"])
def test_more_digits_than_a_float_has_do_not_pass_a_bound(form: str) -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "number", "exclusiveMinimum": 0.25}}, "required": ["x"]}'
    spec = GrammarSpec(form=form, source=schema if form == "json_schema" else f'start: "=" %json {schema} "."\n')
    before, after = ("", "") if form == "json_schema" else ("=", ".")
    assert not takes(spec, before + '{"x": 0.25000000000000001}' + after)
    assert takes(spec, before + '{"x": 0.2500001}' + after)


def test_bounds_of_integers_and_values_stay() -> None:
    schema = {
        "properties": {"exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 3}, "x": {"type": "string"}},
        "enum": [{"type": "number", "exclusiveMinimum": 1}],
        "const": {"exclusiveMaximum": 2},
    }
    before = json.dumps(schema)
    assert not move_bounds(schema)
    assert json.dumps(schema) == before
