"""Drafts through the whole engine: whatever a drafter guesses, greedy tokens stay those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

NUM_TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

DRAFTERS = '''
"""Drafters that know the future, or half of it: they read transformers' tokens from a file."""

import json
import random
from pathlib import Path

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker


class OracleOptions(PluginOptions):
    answers: Path
    right: float = 0.7


class Chain(DraftWorker):
    """Right with a given probability per token."""

    contract = (1, 0)
    Options = OracleOptions

    def __init__(self, options, setup):
        super().__init__(options, setup)
        self._answers = json.loads(options.answers.read_text())
        self._random = random.Random(0)

    def _future(self, request):
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        known = len(request.token_ids) - request.num_prompt_tokens
        return self._answers[json.dumps(prompt)][known : known + request.max_drafts]

    def _maybe(self, token):
        right = self._random.random() < self.options.right
        return token if right else self._random.randrange(self.setup.vocab_size)

    def propose(self, batch):
        return [Draft([self._maybe(token) for token in self._future(request)]) for request in batch.requests]


class Tree(Chain):
    """A wrong first branch, then the right path with wrong siblings: accepted paths are never the first nodes."""

    capabilities = DraftCapabilities(trees=True)

    def propose(self, batch):
        drafts = []
        for request in batch.requests:
            tokens, parents, parent = [], [], -1
            for token in self._future(request):
                if len(tokens) + 2 > request.max_drafts:
                    break
                tokens += [(token + 1) % self.setup.vocab_size, self._maybe(token)]
                parents += [parent, parent]
                parent = len(tokens) - 1
            drafts.append(Draft(tokens, parents))
        return drafts


class Raises(Chain):
    def propose(self, batch):
        raise RuntimeError("no idea")


class OutOfRange(Chain):
    def propose(self, batch):
        return [Draft([self.setup.vocab_size]) for _ in batch.requests]
'''


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """(directory with model, drafters.py and answers.json; prompts; the tokens that transformers generates)."""
    import torch

    directory = tmp_path_factory.mktemp("target")
    model = save_tiny_model(directory, tiny_config("llama"))
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 128) for _ in range(draw.choice([2, 9, 30]))] for _ in range(6)]
    answers = {}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        answers[json.dumps(prompt)] = out[0, len(prompt) :].tolist()
    (directory / "answers.json").write_text(json.dumps(answers))
    (directory / "drafters.py").write_text(DRAFTERS)
    return directory, prompts, list(answers.values())


@pytest.fixture
def make_speculative(target: tuple[Path, Any, Any]) -> Iterator[Callable[..., LLM]]:
    """An `LLM` with one drafter."""
    created: list[LLM] = []
    directory = target[0]

    def make(name: str, *, rule: str = "greedy", num_tokens: int = 6, **sections: Any) -> LLM:
        drafter: dict[str, Any] = {"name": name, "num_tokens": num_tokens}
        if ".py:" in name:
            drafter |= {"answers": str(directory / "answers.json")}
        llm = LLM(
            model={"path": str(directory), "tokenizer_mode": "none", "dtype": "float32"},
            cache={"block_size": 4, "num_blocks": sections.pop("num_blocks", 300)},
            executor={"threads": 1} | sections.pop("executor", {}),
            speculative={"drafters": {"it": drafter}, "default": "it", "acceptance": rule},
            **sections,
        )
        created.append(llm)
        return llm

    yield make
    for llm in created:
        llm.shutdown()


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
@pytest.mark.parametrize("drafter", ["Chain", "Tree", "ngram"])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_greedy_tokens_do_not_change(
    target: Any, make_speculative: Callable[..., LLM], drafter: str, rule: str, attention: str
) -> None:
    directory, prompts, answers = target
    name = drafter if drafter == "ngram" else f"{directory}/drafters.py:{drafter}"
    llm = make_speculative(name, rule=rule, attention=attention)
    outputs = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == answers
    if drafter != "ngram":
        assert all(output.metrics.num_accepted > 0 for output in outputs)
        assert any(output.metrics.num_accepted < output.metrics.num_drafted for output in outputs)


@pytest.mark.parametrize("drafter", ["Chain", "Tree"])
@pytest.mark.parametrize("scheduler", [{"max_num_batched_tokens": 8, "max_num_seqs": 4}, {"max_num_seqs": 6}])
def test_small_budgets_and_small_memory(
    target: Any, make_speculative: Callable[..., LLM], drafter: str, scheduler: dict[str, int]
) -> None:
    directory, prompts, answers = target
    llm = make_speculative(f"{directory}/drafters.py:{drafter}", scheduler=scheduler, num_blocks=66)
    outputs = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert llm.engine.cache_statistics().num_used_blocks == 0


@pytest.mark.parametrize(("drafter", "words"), [("Raises", "no idea"), ("OutOfRange", "outside the vocabulary")])
def test_a_faulty_drafter_costs_only_itself(
    target: Any, make_speculative: Callable[..., LLM], drafter: str, words: str
) -> None:
    directory, prompts, answers = target
    outputs = make_speculative(f"{directory}/drafters.py:{drafter}").generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert all(words in (output.metrics.drafter_error or "") for output in outputs)


def test_a_request_turns_speculation_off(target: Any, make_speculative: Callable[..., LLM]) -> None:
    directory, prompts, answers = target
    llm = make_speculative(f"{directory}/drafters.py:Chain")
    outputs = llm.generate(prompts[:2], [PARAMS, replace(PARAMS, speculation="off")])
    assert [output.outputs[0].token_ids for output in outputs] == answers[:2]
    assert [output.metrics.num_drafted > 0 for output in outputs] == [True, False]
