"""Random traffic over few slots: requests come, are held, go on and are aborted in any order, and each that ends has
the tokens that it gets alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from dovetail import LLM, LoRARequest, RequestOutput, SamplingParams

MakeLLM = Callable[..., LLM]
MakeAdapter = Callable[..., LoRARequest]
PROMPTS = [[3 + 7 * i % 120 for i in range(length)] for length in (5, 9, 14, 22)]
SETTINGS: dict[str, dict[str, Any]] = {
    "tight": {"cache": {"num_blocks": 24, "swap_gib": 0.1}, "model": {"max_model_len": 60}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 10, "max_num_seqs": 3}},
    "priorities": {"scheduler": {"name": "priority"}, "cache": {"num_blocks": 24}, "model": {"max_model_len": 60}},
    "in flight": {"executor": {"name": "gpu", "device": "null", "null_order": "late"}},
}


class Traffic:
    """One engine, and what was asked of it."""

    def __init__(self, llm: LLM, adapters: list[LoRARequest], seed: int):
        self.engine = llm.engine
        self.adapters: list[LoRARequest | None] = [*adapters, None]
        self.random = random.Random(seed)
        self.asked: dict[str, tuple[int, LoRARequest | None, int]] = {}
        """By request: number of its prompt, its adapter, and how many tokens."""
        self.numbers = itertools.count()
        self.held: set[str] = set()
        self.ended: dict[str, RequestOutput] = {}

    def add(self) -> None:
        draw, name = self.random, f"r{next(self.numbers)}"
        number, adapter, length = draw.randrange(len(PROMPTS)), draw.choice(self.adapters), draw.randint(1, 12)
        self.asked[name] = number, adapter, length
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        priority = draw.randrange(3) if self.engine.facts.has_priorities else 0
        self.engine.add_request(name, PROMPTS[number], params, lora_request=adapter, priority=priority)

    def disturb(self) -> None:
        """Holds, resumes or aborts one of the requests, or does nothing."""
        running = [name for name in self.engine.request_ids if name not in self.held]
        action = self.random.random()
        if action < 0.2 and running:
            self.held.add(self.random.choice(running))
            self.engine.hold(self.held)
        elif action < 0.4 and self.held:
            self.engine.resume(self.held.pop())
        elif action < 0.45 and running:
            name = self.random.choice(running)
            self.engine.abort_request(name)
            del self.asked[name]
            self.held.discard(name)

    def step(self) -> None:
        if self.engine.is_runnable:
            self.ended |= {output.request_id: output for output in self.engine.step() if output.finished}

    def drain(self) -> None:
        self.engine.resume(list(self.held))
        while self.engine.has_unfinished_requests():
            self.step()


@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_gets_the_tokens_that_it_gets_alone(
    name: str, make_llm: MakeLLM, make_adapter: MakeAdapter
) -> None:
    adapters = [make_adapter(f"a{index}", index, rank=2 + index) for index in range(5)]
    traffic = Traffic(make_llm(lora={"enabled": True, "max_loras": 2}, **SETTINGS[name]), adapters, seed=1)
    for lora in adapters:
        traffic.engine.add_lora(lora)
    for _ in range(30):
        traffic.add()
        traffic.disturb()
        traffic.step()
    traffic.drain()
    oracle = make_llm(lora={"enabled": True, "max_loras": 5})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = {
        (number, adapter): oracle.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0]
        for number, prompt in enumerate(PROMPTS)
        for adapter in traffic.adapters
    }
    assert traffic.ended.keys() >= traffic.asked.keys()
    for request, (number, adapter, length) in traffic.asked.items():
        output = traffic.ended[request]
        assert output.error is None
        assert output.outputs[0].token_ids == alone[number, adapter].outputs[0].token_ids[:length]
    slots = traffic.engine.tokens._adapters.slots
    assert slots is not None
    assert not slots._refused
    assert slots._first_in_line is None
