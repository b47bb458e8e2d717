"""Outputs with a grammar: what the model would have chosen among what is legal, however the engine computes it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import LLM, RequestOutput, SamplingParams, StructuredOutputs
from dovetail.contracts.errors import GenerationError, RequestError
from dovetail.testing.grammar_cases import byte_vocabulary

MakeLLM = Callable[..., LLM]
DATE = StructuredOutputs(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}")
WORDS = StructuredOutputs(choice=["yes", "yesterday", "no", "north", "maybe"])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "yy", "yyy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OBJECT = StructuredOutputs(json=SCHEMA, max_whitespace=1)
TAGS = StructuredOutputs(
    structural_tag={"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]}
)
FORMS = [DATE, WORDS, OBJECT, TAGS]
PROMPTS = ["hello", "12-12-12-12", 'abc {"a": 1']
NGRAM = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}}}
GUESSERS = Path(__file__).parent / "guessers.py"
TREE = {"drafters": {"tree": {"name": f"{GUESSERS}:Tree", "num_tokens": 6, "length": "fixed"}}}


def greedy(form: StructuredOutputs | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 48, "structured_outputs": form, **more})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def every_form(llm: LLM, **more: Any) -> list[list[int]]:
    """Tokens of each form after each prompt, all in one batch."""
    pairs = [(prompt, form) for prompt in PROMPTS for form in FORMS]
    return tokens(llm.generate([prompt for prompt, _ in pairs], [greedy(form, **more) for _, form in pairs]))


@pytest.fixture(scope="module")
def expected(byte_model: Path) -> list[list[int]]:
    """What a plain engine gives, one request at a time."""
    llm = LLM(model={"path": str(byte_model), "dtype": "float32", "max_model_len": 256}, executor={"threads": 1})
    found = [tokens(llm.generate([prompt], greedy(form)))[0] for prompt in PROMPTS for form in FORMS]
    llm.shutdown()
    return found


def walk_by_hand(byte_model: Path, prompt: str, legal: list[bytes]) -> list[int]:
    """The most likely legal token each time, by transformers, over a list of all legal outputs."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(byte_model, dtype=torch.float32).eval()
    ends = list(byte_vocabulary().end_ids)
    ids, output = list(prompt.encode()), b""
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        allowed = {text[len(output)] for text in legal if text.startswith(output) and len(text) > len(output)}
        allowed |= set(ends) if output in legal else set()
        token = max(allowed, key=lambda i: float(logits[i]))
        ids.append(token)
        if token in ends:
            return ids[len(prompt.encode()) :]
        output += bytes([token])


@pytest.mark.parametrize(
    ("form", "legal"),
    [
        (WORDS, [word.encode() for word in ("yes", "yesterday", "no", "north", "maybe")]),
        (StructuredOutputs(regex="a{1,3}(b|cc)?"), [b"a" * n + end for n in (1, 2, 3) for end in (b"", b"b", b"cc")]),
        (StructuredOutputs(json={"type": "integer", "minimum": 7, "maximum": 12}), [b"%d" % i for i in range(7, 13)]),
        (StructuredOutputs(grammar='root ::= "x" ("y" | "z")'), [b"xy", b"xz"]),
        (StructuredOutputs(grammar='start: "x" ("y" | "z")'), [b"xy", b"xz"]),
    ],
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_takes_the_most_likely_legal_token_each_time(byte_llm, byte_model, form, legal, prompt):
    [output] = byte_llm().generate([prompt], greedy(form))
    assert tokens([output]) == [walk_by_hand(byte_model, prompt, legal)]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.encode() in legal


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"attention": "reference"},
        {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 3}},
        {"cache": {"block_size": 4, "num_blocks": 36}, "model": {"max_model_len": 96}},
        {"cache": {"block_size": 4, "num_blocks": 36, "swap_gib": 0.01}, "model": {"max_model_len": 96}},
        {"cache": {"block_size": 4, "num_blocks": 400, "prefix_caching": False}},
        {"speculative": NGRAM},
        {"speculative": TREE, "attention": "reference"},
        {
            "speculative": NGRAM,
            "cache": {"block_size": 4, "num_blocks": 40},
            "model": {"max_model_len": 96},
        },
    ],
    ids=["batch", "reference", "chunks", "recompute", "swap", "no_cache", "chain", "tree", "chain_recompute"],
)
def test_the_tokens_do_not_depend_on_how_they_are_computed(byte_llm, byte_model, expected, sections):
    sections = dict(sections)
    model = {"path": str(byte_model), "dtype": "float32", "max_model_len": 256} | sections.pop("model", {})
    assert every_form(byte_llm(model=model, **sections)) == expected


def test_another_plugin_gives_the_same_tokens_for_the_same_texts(byte_llm, expected):
    pytest.importorskip("xgrammar")
    found = every_form(byte_llm(grammar="xgrammar"))
    # Free text is UTF-8 for one of the two.
    assert [one for i, one in enumerate(found) if FORMS[i % 4] is not TAGS] == [
        one for i, one in enumerate(expected) if FORMS[i % 4] is not TAGS
    ]


def test_preemption_happens_in_the_small_memories_above(byte_llm, byte_model):
    llm = byte_llm(model={"max_model_len": 96}, cache={"num_blocks": 36})
    pairs = [(prompt, form) for prompt in PROMPTS for form in FORMS]
    llm.generate([prompt for prompt, _ in pairs], [greedy(form) for _, form in pairs])
    outputs = llm.generate([prompt for prompt, _ in pairs], [greedy(form) for _, form in pairs])
    assert any(output.metrics.num_preemptions for output in outputs)


def test_forbidden_drafts_are_not_verified_and_legal_ones_are_accepted(byte_llm):
    llm = byte_llm(speculative=NGRAM)
    form = StructuredOutputs(regex="(12-)*34")
    [output] = llm.generate(["12-12-12-12-"], greedy(form, max_tokens=24, logit_bias={ord("3"): -50}))
    totals = llm.engine.speculation_totals()["lookup"]
    assert output.outputs[0].text.startswith("12-12-12-")
    assert totals.num_accepted > 10


def test_seeded_samples_are_the_same_with_drafts_that_are_not_drawn(byte_llm):
    params = [SamplingParams(temperature=1.3, seed=seed, max_tokens=30, structured_outputs=OBJECT) for seed in range(8)]
    plain = tokens(byte_llm().generate(["hello"] * 8, params))
    assert tokens(byte_llm(speculative=NGRAM).generate(["hello"] * 8, params)) == plain
    assert len({tuple(one) for one in plain}) > 4


@pytest.mark.parametrize("how", [{"n": 4}, {"n": 2, "best_of": 5}])
def test_each_completion_of_a_request_has_a_matcher_of_its_own(byte_llm, how):
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=40, structured_outputs=DATE, **how)
    [output] = byte_llm().generate(["hello"], params)
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) == how["n"]
    assert all(re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text) for text in texts)


def test_requests_without_a_grammar_are_left_alone(byte_llm):
    plain = tokens(byte_llm().generate(PROMPTS, greedy(None)))
    mixed = byte_llm().generate([*PROMPTS, "hello"], [greedy(None)] * 3 + [greedy(DATE)])
    assert tokens(mixed)[:3] == plain


def test_log_probabilities_are_those_before_the_mask(byte_llm, byte_model):
    from transformers import AutoModelForCausalLM

    [output] = byte_llm().generate(["hello"], greedy(DATE, logprobs=1))
    model: Any = AutoModelForCausalLM.from_pretrained(byte_model, dtype=torch.float32).eval()
    with torch.no_grad():
        raw = model(torch.tensor([list(b"hello")])).logits[0, -1].log_softmax(-1)
    first, token = output.outputs[0].logprobs[0], output.outputs[0].token_ids[0]
    assert first[token].logprob == pytest.approx(float(raw[token]), abs=1e-4)
    assert int(raw.argmax()) in first


def test_min_tokens_puts_the_end_off_until_the_grammar_is_done(byte_llm):
    form = StructuredOutputs(regex="a{1,9}")
    [few] = byte_llm().generate(["x"], greedy(form, logit_bias={byte_vocabulary().end_ids[0]: 100}))
    [more] = byte_llm().generate(["x"], greedy(form, min_tokens=4, logit_bias={byte_vocabulary().end_ids[0]: 100}))
    [most] = byte_llm().generate(["x"], greedy(form, min_tokens=40))
    assert [one.outputs[0].text for one in (few, more, most)] == ["a", "aaaa", "a" * 9]
    assert most.outputs[0].finish_reason == "stop"


def test_stop_strings_and_lengths_cut_as_ever(byte_llm):
    [stopped] = byte_llm().generate(["x"], greedy(StructuredOutputs(regex="ab(cd){9}"), stop=["dc"]))
    [cut] = byte_llm().generate(["x"], greedy(StructuredOutputs(regex="ab(cd){9}"), max_tokens=5))
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("abc", "stop")
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("abcdc", "length")


def test_other_masks_may_leave_nothing_and_fail_that_request_alone(byte_llm):
    params = [greedy(DATE, allowed_token_ids=[ord("a")]), greedy(WORDS)]
    with pytest.raises(GenerationError, match="no token is left") as raised:
        byte_llm().generate(["hello"] * 2, params)
    assert [output.outputs[0].finish_reason for output in raised.value.outputs] == ["error", "stop"]


def test_what_cannot_be_compiled_ends_its_own_request(byte_llm):
    wrong = StructuredOutputs(json={"type": "integer", "maxLenght": 3})
    with pytest.raises(GenerationError, match="maxLenght") as raised:
        byte_llm().generate(["hello"] * 2, [greedy(wrong), greedy(WORDS)])
    assert [output.outputs[0].finish_reason for output in raised.value.outputs] == ["error", "stop"]


def test_what_takes_too_long_to_compile_ends_its_own_request(byte_llm):
    bomb = StructuredOutputs(json={"type": "integer", "multipleOf": 1000003})
    llm = byte_llm(grammar={"compile_seconds": 0.2})
    with pytest.raises(GenerationError, match=r"0\.2 seconds") as raised:
        llm.generate(["hello"] * 2, [greedy(bomb), greedy(WORDS)])
    assert [output.outputs[0].finish_reason for output in raised.value.outputs] == ["error", "stop"]


SLOW = """\
import threading
from dovetail.plugins.grammars.llguidance import LLGuidanceGrammar

gate = threading.Event()

class Slow(LLGuidanceGrammar):
    def compile(self, spec):
        assert gate.wait(60)
        return super().compile(spec)
"""


def test_a_request_is_held_while_its_grammar_is_compiled_and_others_go_on(byte_llm, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    llm = byte_llm(grammar=f"{tmp_path / 'slow.py'}:Slow")
    engine = llm.engine
    engine.add_request("late", "hello", greedy(WORDS))
    engine.add_request("free", "hello", greedy(None, max_tokens=5))
    engine.resume("late")  # nobody can resume what waits for its grammar
    ended = [output.request_id for _ in range(8) for output in engine.step() if output.finished]
    assert ended == ["free"]
    assert not engine.is_runnable
    gate = type(engine.tokens._parts.grammars.compiler._plugin()).compile.__globals__["gate"]
    gate.set()
    with engine.wakeup:
        assert engine.wakeup.wait_for(lambda: engine.is_runnable, timeout=60)
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["free", "late"]


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(byte_llm, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    engine = byte_llm(grammar=f"{tmp_path / 'slow.py'}:Slow").engine
    engine.add_request("late", "hello", greedy(StructuredOutputs(json={"maxLenght": 1})))
    [output] = engine.abort_request("late")
    gate = type(engine.tokens._parts.grammars.compiler._plugin()).compile.__globals__["gate"]
    landed = threading.Event()
    engine.tokens._parts.grammars.compiler.compile(StructuredOutputs(json={"maxLenght": 1}).spec).add_done_callback(
        lambda _: landed.set()
    )
    gate.set()
    assert landed.wait(60)
    assert engine.step() == []
    assert output.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"grammar": None}, "grammar to null"),
        ({"model": {"tokenizer_mode": "none"}}, "reads tokenizers in the form of tokenizer.json"),
    ],
)
def test_an_engine_without_grammars_says_why(byte_llm, byte_model, sections, message):
    sections = dict(sections)
    model = {"path": str(byte_model), "dtype": "float32"} | sections.pop("model", {})
    with pytest.raises(RequestError, match=message):
        byte_llm(model=model, **sections).generate([[1, 2, 3]], greedy(WORDS, detokenize=False))


def test_a_form_that_the_plugin_does_not_compile_is_refused(byte_llm):
    pytest.importorskip("xgrammar")
    with pytest.raises(RequestError, match="no grammars of form lark"):
        byte_llm(grammar="xgrammar").generate(["hello"], greedy(StructuredOutputs(grammar='start: "a"')))


@pytest.mark.parametrize("sections", [{}, {"speculative": NGRAM}, {"speculative": TREE, "attention": "reference"}])
@pytest.mark.parametrize("marker", ["</t>", [200]])
def test_the_form_begins_behind_the_marker(byte_llm, sections, marker):
    ids = list(marker.encode()) if isinstance(marker, str) else marker
    form = StructuredOutputs(choice=["yes", "no"], starts_after=marker)
    [output] = byte_llm(**sections).generate(["hello"], greedy(form, allowed_token_ids=[*ids, *b"yesno", *END_IDS]))
    found = bytes(token for token in output.outputs[0].token_ids if token < 256)
    thought, _, answer = found.partition(bytes(ids))
    if output.outputs[0].finish_reason == "stop":
        assert answer in (b"yes", b"no")
    else:
        assert b"yes".startswith(answer) or b"no".startswith(answer)
    assert not set(output.outputs[0].token_ids[: len(thought)]) & set(END_IDS)


END_IDS = byte_vocabulary().end_ids


@pytest.mark.parametrize("sections", [{}, {"speculative": NGRAM}])
def test_a_marker_of_one_token_is_found_wherever_it_comes(byte_llm, sections):
    form = StructuredOutputs(choice=["yes", "no"], starts_after=[200])
    llm = byte_llm(**sections)
    [output] = llm.generate(["hello"], greedy(form, logit_bias={200: 100}))
    assert output.outputs[0].token_ids[0] == 200
    assert bytes(output.outputs[0].token_ids[1:-1]) in (b"yes", b"no")


def test_a_prompt_that_ends_with_the_marker_needs_no_other(byte_llm):
    form = StructuredOutputs(choice=["yes", "no"], starts_after="</t>")
    [output] = byte_llm().generate(["so</t>"], greedy(form))
    assert output.outputs[0].text in ("yes", "no")


VALUES = st.recursive(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["a", "bc", 3]}])
    | st.tuples(st.integers(-20, 20), st.integers(0, 30)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )
    | st.integers(0, 3).map(lambda most: {"type": "string", "maxLength": most}),
    lambda inner: (
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": pair[1] + 1}
        )
        | st.dictionaries(st.sampled_from(["k", "l", "m"]), inner, min_size=1).map(
            lambda parts: {
                "type": "object",
                "properties": parts,
                "required": sorted(parts),
                "additionalProperties": False,
            }
        )
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def shared_llms(byte_model: Path) -> Any:
    common = {
        "model": {"path": str(byte_model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 400},
        "executor": {"threads": 1},
    }
    made = [LLM(**common), LLM(**common, speculative=NGRAM)]
    yield made
    for llm in made:
        llm.shutdown()


# The same examples each time: a draw within rounding of a boundary may fall to either side in batches of other shapes.
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=VALUES, seed=st.integers(0, 2**32))
def test_outputs_that_stopped_are_instances_of_their_schema(shared_llms, schema, seed):
    form = StructuredOutputs(json=schema, max_whitespace=1)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=120, structured_outputs=form)
    one, other = [llm.generate(["hello"], params)[0].outputs[0] for llm in shared_llms]
    assert one.token_ids == other.token_ids
    if one.finish_reason == "stop":
        jsonschema.Draft202012Validator(schema).validate(json.loads(one.text))
