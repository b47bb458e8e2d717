"""Parameters under vLLM's names."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

import dovetail
from dovetail.contracts.errors import RequestError
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.vllm import (
    BeamSearchParams,
    GuidedDecodingParams,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)
from dovetail.vllm.sampling_params import RequestOutputKind


def test_positions() -> None:
    assert SamplingParams(2, 3).num_sequences == 3
    assert (BeamSearchParams(2, 5).beam_width, BeamSearchParams(2, 5).max_tokens) == (2, 5)


def test_fields_have_vllms_forms() -> None:
    params = SamplingParams(stop="a", stop_token_ids=None, extra_args={"a": 1}, seed=-1, logprobs=True, skip_clone=True)
    assert (params.stop, params.stop_token_ids, params.extra_args, params.extra) == (["a"], [], {"a": 1}, {"a": 1})
    assert (params.seed, params.logprobs) == (None, 1)
    params.stop.append("b")  # type: ignore[union-attr]
    params.extra_args = {"b": 2}  # type: ignore[misc]
    assert params.snapshot() == dovetail.SamplingParams(stop=["a", "b"], extra={"b": 2}, logprobs=1)


def test_output_kinds_are_dovetails_own_words() -> None:
    assert dovetail.SamplingParams(output_kind=RequestOutputKind.DELTA).output_kind == "delta"


def test_from_optional_takes_none_for_defaults_and_bounds_the_bias() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=None, max_tokens=None, logit_bias={"5": 300})
    assert params == SamplingParams(max_tokens=None, logit_bias={5: 100.0})


@pytest.mark.parametrize("bias", [{"x": 1}, {"1": "x"}, 5])
def test_a_bias_that_is_none_is_refused(bias: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias=bias)


def test_a_clone_changes_by_itself() -> None:
    params = SamplingParams(stop=["a"])
    clone = params.clone()
    clone.temperature, clone.stop[0] = 0.0, "b"  # type: ignore[index]
    assert (params.temperature, params.stop) == (1.0, ["a"])
    assert clone.sampling_type is SamplingType.GREEDY
    assert params.sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=1).sampling_type is SamplingType.RANDOM_SEED


def test_copies_keep_what_was_changed() -> None:
    params = SamplingParams(max_tokens=3)
    params.top_k = 5
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).top_k == 5


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"use_beam_search": True}, "LLM.beam_search"),
        ({"logits_processors": [print]}, "section logits_processors"),
        ({"spaces_between_special_tokens": False}, "no such spaces"),
    ],
)
def test_what_is_not_served_says_why(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        SamplingParams(**given)
    with pytest.raises(RequestError, match=reason):
        setattr(SamplingParams(), *next(iter(given.items())))


def test_what_asks_for_what_happens_anyway_is_taken() -> None:
    quiet = SamplingParams(use_beam_search=False, guided_decoding=None, spaces_between_special_tokens=True)
    assert quiet == SamplingParams()


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize("kind", [StructuredOutputsParams, GuidedDecodingParams])
def test_structured_outputs_are_taken_under_both_names(name: str, kind: type[StructuredOutputs]) -> None:
    form = kind(json={"type": "integer"}, disable_any_whitespace=True)
    params = SamplingParams(**{name: form})
    assert params.guided_decoding is params.structured_outputs is form
    assert params.snapshot().structured_outputs is form
    assert form.spec == dovetail.StructuredOutputs(json={"type": "integer"}, max_whitespace=0).spec
    params = SamplingParams()
    setattr(params, name, kind(regex="a+"))
    assert params.structured_outputs is not None
    assert pickle.loads(pickle.dumps(params)).structured_outputs.spec == kind(regex="a+").spec


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"json": "{}", "regex": "a"}, "exactly one of"),
        ({"json": "{}", "disable_additional_properties": True}, "into the schema"),
        ({"json": "{}", "whitespace_pattern": " ?"}, "max_whitespace"),
        ({"regex": "a", "backend": "xgrammar"}, "grammar.name"),
    ],
)
def test_structured_outputs_that_are_not_served_say_why(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        GuidedDecodingParams(**given)


def test_unknown_fields_name_the_nearest() -> None:
    for kind in (SamplingParams, dovetail.SamplingParams):
        with pytest.raises(TypeError, match="SamplingParams: unknown field 'max_token': did you mean max_tokens"):
            kind(max_token=5)
    with pytest.raises(AttributeError, match="unknown field 'max_token': did you mean max_tokens"):
        SamplingParams().max_token = 5  # type: ignore[attr-defined]


def test_dovetails_own_say_how_they_are_changed() -> None:
    params = dovetail.SamplingParams()
    with pytest.raises(FrozenInstanceError, match=r"dataclasses.replace\(params, max_tokens=64\)"):
        params.max_tokens = 64  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="unknown field 'max_token': did you mean max_tokens"):
        params.max_token = 64  # type: ignore[attr-defined]
