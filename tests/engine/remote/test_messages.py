"""A request is the same behind the message that carries it to the engine's process."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dovetail import LoRARequest, SamplingParams
from dovetail.contracts.grammar_spec import GrammarSpec, OutputGrammar
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.remote import messages
from dovetail.engine.remote.messages import Submit

FULL = ProcessedInput(
    prompt="Once",
    token_ids=[4, 5, 6],
    params=SamplingParams(temperature=0.5, seed=3, max_tokens=9, stop_token_ids=[8], logprobs=2, prediction=[1, 2]),
    max_total_tokens=12,
    eos_token_ids=(2, 3),
    stop_ids=frozenset({2, 3, 8}),
    bad_word_ids=((7,), (9, 10)),
    drafter="lookup",
    cache_salt="salt",
    shows_logprobs=True,
    grammar=OutputGrammar(spec=GrammarSpec(form="regex", source="[ab]+"), starts_after=(11,)),
    prediction=(1, 2),
    pooling=PoolingParams(task="embed", dimensions=8, normalize=False),
    needs_every_state=True,
    token_types=(0, 0, 1),
    lora_request=LoRARequest("pirate", 3, "/adapters/pirate"),
)
STAYS_WITH_THE_CLIENT = {"prompt"}


@pytest.mark.parametrize(
    "name", [each.name for each in fields(ProcessedInput) if each.name not in STAYS_WITH_THE_CLIENT]
)
def test_the_message_carries_every_field_of_a_request(name: str) -> None:
    assert getattr(FULL, name), "a field that says something, so that its loss shows"
    message = messages.submit_message(
        "a", FULL, priority=0, cache_salt=None, arrival_time=0.0, trace_headers=None, user=None
    )
    received = messages.decode_to_engine(messages.encode(message))
    assert isinstance(received, Submit)
    assert getattr(messages.processed_input(received), name) == getattr(FULL, name)
