"""The next prompt of a conversation keeps the model's own ids, over many chat templates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.rl.prefix_tokens import PrefixOutcome, PrefixVerdict, replace_prefix_tokens
from tests.rl.chat_templates import (
    CHATML,
    COUNTING,
    DEEPSEEK,
    EOS_OF_USERS,
    FORGETTING,
    GEMMA,
    LATE_STRIPPING,
    LLAMA3,
    MISTRAL,
    PHI,
    REMINDING,
    TEMPLATES,
    TRIMMING,
    WITHOUT_EOS,
    ZEPHYR,
    ChatTemplate,
    decode,
    encode,
)

Ids = list[int]
ANSWER = "the answer is 42, because 6 times 7 is 42."


@dataclass(frozen=True)
class Turn:
    """A message of the user's or of a tool, and the model's answer to it."""

    role: str
    asked: str
    answer: str
    seed: int
    """Of the splits of the answer; 0: the tokenizer's own."""
    is_ended: bool = True
    """Whether the model ended it, or was cut off."""


@dataclass(frozen=True)
class Prompt:
    """One call of the function, in a conversation."""

    model_ids: Ids
    template_ids: Ids
    token_ids: Ids
    verdict: PrefixVerdict


def another_split(text: str, seed: int) -> Ids:
    """Tokens of the text, cut in places where the tokenizer would not."""
    if seed == 0:
        return encode(text)
    draw = random.Random(seed)
    cuts = sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(max(len(text) // 4, 1)))})
    return [token for start, end in pairwise(cuts) for token in encode(text[start:end])]


def converse(template: ChatTemplate, turns: list[Turn], *, keep_rewritten: bool = False) -> Iterator[Prompt]:
    """The prompts of a conversation, behind each of which the model says what its turn has."""
    messages: list[dict[str, str]] = []
    model_ids: Ids = []
    prefix_ids: Ids = []
    for turn in turns:
        messages.append({"role": turn.role, "content": turn.asked})
        template_ids = template.token_ids(messages)
        token_ids, verdict = replace_prefix_tokens(
            model_ids,
            prefix_ids,
            template_ids,
            eos_token_ids={template.eos_token_id},
            decode=decode,
            keep_rewritten=keep_rewritten,
        )
        yield Prompt(model_ids, template_ids, token_ids, verdict)
        completion = another_split(turn.answer, turn.seed)
        messages.append({"role": "assistant", "content": decode(completion)})
        model_ids = token_ids + completion + ([template.eos_token_id] if turn.is_ended else [])
        prefix_ids = template.token_ids(messages, for_answer=False)


def two_turns(template: ChatTemplate, answer: str = ANSWER, *, seed: int = 3, keep_rewritten: bool = False) -> Prompt:
    """The second prompt of a conversation."""
    turns = [Turn("user", "What is 6 times 7?", answer, seed), Turn("user", "Again?", "42", 0)]
    return list(converse(template, turns, keep_rewritten=keep_rewritten))[-1]


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, MISTRAL, GEMMA, PHI, ZEPHYR, DEEPSEEK, TRIMMING], ids=lambda template: template.name
)
def test_the_models_ids_are_kept_where_the_text_is_the_same(template: ChatTemplate) -> None:
    prompt = two_turns(template)
    assert prompt.template_ids[: len(prompt.model_ids)] != prompt.model_ids  # the rendering loses them
    assert prompt.verdict.outcome is PrefixOutcome.RETOKENIZED
    assert prompt.token_ids[: len(prompt.model_ids)] == prompt.model_ids
    assert decode(prompt.token_ids) == decode(prompt.template_ids)


@pytest.mark.parametrize(
    ("template", "answer", "outcome"),
    [
        (DEEPSEEK, f"<think>I think.</think>{ANSWER}", PrefixOutcome.REWRITTEN),
        (LATE_STRIPPING, f"<think>I think.</think>{ANSWER}", PrefixOutcome.REWRITTEN),
        (TRIMMING, f"  {ANSWER}\n", PrefixOutcome.REWRITTEN),
        (COUNTING, ANSWER, PrefixOutcome.REWRITTEN),
        (WITHOUT_EOS, ANSWER, PrefixOutcome.NO_EOS),
        (EOS_OF_USERS, ANSWER, PrefixOutcome.NO_EOS),
    ],
    ids=lambda value: value.name if isinstance(value, ChatTemplate) else None,
)
def test_the_verdict_says_why_a_prefix_is_lost(template: ChatTemplate, answer: str, outcome: PrefixOutcome) -> None:
    prompt = two_turns(template, answer)
    verdict, index = prompt.verdict, prompt.verdict.index
    assert (verdict.preserved, verdict.outcome) == (False, outcome)
    assert prompt.token_ids == prompt.template_ids
    assert index is not None
    assert prompt.template_ids[:index] == prompt.model_ids[:index]
    assert prompt.template_ids[index] != prompt.model_ids[index]


def test_the_verdict_shows_what_the_template_changed() -> None:
    verdict = two_turns(DEEPSEEK, "<think>I think.</think>It is 42.").verdict
    assert verdict.turn == 0
    assert "<think>I think.</think>It is 42." in verdict.message
    assert "became" in verdict.message


@pytest.mark.parametrize("template", [DEEPSEEK, LATE_STRIPPING, TRIMMING], ids=lambda template: template.name)
def test_rewritten_turns_are_kept_where_that_is_asked_for(template: ChatTemplate) -> None:
    prompt = two_turns(template, f" <think>I think.</think>{ANSWER}\n", keep_rewritten=True)
    assert (prompt.verdict.preserved, prompt.verdict.outcome) == (True, PrefixOutcome.REWRITTEN)
    assert prompt.token_ids[: len(prompt.model_ids)] == prompt.model_ids
    assert decode(prompt.token_ids).count("Again?") == 1


def test_reasoning_that_is_stripped_late_costs_no_turn() -> None:
    """The old rendering has the reasoning and is longer than the new one up to the next question: an EOS that is looked
    for by its index in the old rendering would be that of the question, which would be lost."""
    prompt = two_turns(LATE_STRIPPING, "<think>" + "I think. " * 20 + "</think>42", keep_rewritten=True)
    eos = LATE_STRIPPING.eos_token_id
    assert [token for token in prompt.token_ids if token == eos] == [eos] * 3
    assert decode(prompt.token_ids).endswith("Again?<|im_end|>\n<|im_start|>assistant\n")


def test_a_message_that_the_template_inserts_is_not_spliced_over() -> None:
    """With one turn more in front, the EOS of the same number ends another message."""
    turns = [Turn("user", f"Question {i}", ANSWER, 3) for i in range(3)]
    prompt = list(converse(REMINDING, turns, keep_rewritten=True))[-1]
    assert (prompt.verdict.preserved, prompt.verdict.outcome) == (False, PrefixOutcome.REWRITTEN)
    assert prompt.token_ids == prompt.template_ids


def test_a_template_that_forgets_messages_has_fewer_turns() -> None:
    turns = [Turn("user", f"Question {i}", ANSWER, 3) for i in range(3)]
    prompt = list(converse(FORGETTING, turns))[-1]
    assert (prompt.verdict.preserved, prompt.verdict.outcome) == (False, PrefixOutcome.DROPPED_TURN)
    assert prompt.token_ids == prompt.template_ids


def test_a_turn_that_was_cut_off_gets_the_templates_eos() -> None:
    turns = [Turn("user", "Why?", ANSWER, 3, is_ended=False), Turn("user", "Again?", "", 0)]
    prompt = list(converse(CHATML, turns))[-1]
    assert prompt.verdict.preserved
    assert prompt.token_ids[len(prompt.model_ids)] == CHATML.eos_token_id
    assert decode(prompt.token_ids) == decode(prompt.template_ids)


def test_a_model_may_end_its_turn_with_another_eos_than_the_template_writes() -> None:
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ANSWER}]
    other = encode("<|endoftext|>")
    model_ids = CHATML.token_ids(messages[:1]) + another_split(ANSWER, 3) + other
    prefix_ids = CHATML.token_ids(messages, for_answer=False)
    template_ids = CHATML.token_ids([*messages, {"role": "user", "content": "Again?"}])
    token_ids, verdict = replace_prefix_tokens(
        model_ids, prefix_ids, template_ids, eos_token_ids={CHATML.eos_token_id, *other}, decode=decode
    )
    assert verdict.preserved
    assert token_ids[: len(model_ids)] == model_ids
    assert decode(token_ids) == decode(template_ids).replace(f"{ANSWER}<|im_end|>", f"{ANSWER}<|endoftext|>")


def test_before_the_first_turn_the_prompt_is_the_rendering() -> None:
    template_ids = CHATML.token_ids([{"role": "user", "content": "Why?"}])
    token_ids, verdict = replace_prefix_tokens([], [], template_ids, eos_token_ids=[1], decode=decode)
    assert (token_ids, verdict.preserved, verdict.outcome) == (template_ids, True, PrefixOutcome.SAME)


def test_what_cannot_tell_turns_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="eos_token_ids is empty"):
        replace_prefix_tokens([1], [1], [1], eos_token_ids=[], decode=decode)
    with pytest.raises(ValueError, match="skip_special_tokens=False"):
        replace_prefix_tokens([1], [1], [1], eos_token_ids=[1], decode=lambda ids: "")
    with pytest.raises(ValueError, match="template_prefix_ids is empty"):
        replace_prefix_tokens([1], [], [1], eos_token_ids=[1], decode=decode)


PIECES = st.sampled_from(
    [
        "the answer",
        " is",
        " 42",
        "\n",
        "  ",
        "é",
        "思",
        "🙂",
        "Thinking about it again",
        "<think>hm</think>",
        "user",
        ":",
    ]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
ASKED = st.lists(PIECES | st.sampled_from([*(template.eos for template in TEMPLATES), "[INST]"]), max_size=4).map(
    "".join
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Each message with a mark of its own."""
    return [
        Turn(
            draw(st.sampled_from(["user", "tool"])) if number else "user",
            f"Q{number};" + draw(ASKED),
            draw(TEXTS) + f"A{number};",
            draw(st.integers(0, 1000)),
            draw(st.booleans()),
        )
        for number in range(draw(st.integers(2, 5)))
    ]


@settings(max_examples=150, deadline=None)
@given(template=st.sampled_from(TEMPLATES), turns=conversations(), keep_rewritten=st.booleans())
def test_laws(template: ChatTemplate, turns: list[Turn], keep_rewritten: bool) -> None:
    for prompt in converse(template, turns, keep_rewritten=keep_rewritten):
        model_ids, template_ids, verdict = prompt.model_ids, prompt.template_ids, prompt.verdict
        starts_with_model = prompt.token_ids[: len(model_ids)] == model_ids
        if verdict.preserved:
            assert starts_with_model
        if not verdict.preserved or verdict.outcome is PrefixOutcome.SAME:
            assert (prompt.token_ids, verdict.resumed_at) == (template_ids, 0)
        else:
            assert prompt.token_ids[len(model_ids) :] == template_ids[verdict.resumed_at :]
        if template_ids[: len(model_ids)] == model_ids:
            assert (verdict.outcome, verdict.index) == (PrefixOutcome.SAME, None)
        if verdict.outcome is PrefixOutcome.RETOKENIZED:
            assert decode(prompt.token_ids) == decode(template_ids)
        if not keep_rewritten:
            assert decode(prompt.token_ids) == decode(template_ids)


@settings(max_examples=150, deadline=None)
@given(template=st.sampled_from(TEMPLATES), turns=conversations(), keep_rewritten=st.booleans())
def test_no_turn_is_lost_and_none_appears_twice(
    template: ChatTemplate, turns: list[Turn], keep_rewritten: bool
) -> None:
    marks = [mark for number in range(len(turns)) for mark in (f"Q{number};", f"A{number};")]
    for prompt in converse(template, turns, keep_rewritten=keep_rewritten):
        text, rendered = decode(prompt.token_ids), decode(prompt.template_ids)
        assert all(text.count(mark) == rendered.count(mark) for mark in marks if mark in rendered)


@settings(max_examples=50, deadline=None)
@given(template=st.sampled_from([CHATML, LLAMA3, MISTRAL, GEMMA, PHI, ZEPHYR]), turns=conversations())
def test_plain_templates_never_lose_the_prefix(template: ChatTemplate, turns: list[Turn]) -> None:
    assert all(prompt.verdict.preserved for prompt in converse(template, turns))
