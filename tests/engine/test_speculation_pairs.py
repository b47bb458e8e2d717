"""Speculation beside every other feature: what comes out is what comes out without it.

Plain decoding of the same engine is the oracle. Two of the drafters know its answers, and are right in most of their
guesses, so that every round has drafts that stand and drafts that fall; greedy and seeded requests must keep their
tokens, since none of these drafters draws. Medusa heads fitted to its answers, and a model much like the target as a
draft model, go through the pairs that matter to states and pages of a drafter's own; the latter draws for sampled
requests, so greedy ones alone are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, BeamSearchParams, SamplingParams
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

KNOWING = '''
import json
from pathlib import Path

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker


class Options(PluginOptions):
    answers: Path


class Chain(DraftWorker):
    """Knows what plain decoding gave, and is wrong at every position that divides by 4."""

    contract = (1, 0)
    Options = Options
    capabilities = DraftCapabilities(stateless=True)

    def _future(self, request):
        known = request.token_ids.tolist()
        for answer in json.loads(self.options.answers.read_text()):
            if answer[: len(known)] == known:
                return len(known), answer[len(known) : len(known) + request.max_drafts]
        return len(known), []

    def _guess(self, position, token):
        return token if position % 4 else (token + 1) % self.setup.vocab_size

    def propose(self, batch):
        drafts = []
        for request in batch.requests:
            start, tokens = self._future(request)
            drafts.append(Draft([self._guess(start + i, token) for i, token in enumerate(tokens)]))
        return drafts


class Tree(Chain):
    """A wrong branch before each right node."""

    capabilities = DraftCapabilities(stateless=True, trees=True)

    def propose(self, batch):
        drafts = []
        for request in batch.requests:
            tokens, parents, parent = [], [], -1
            start, future = self._future(request)
            for i, token in enumerate(future[: request.max_drafts // 2]):
                tokens += [(token + 2) % self.setup.vocab_size, self._guess(start + i, token)]
                parents += [parent, parent]
                parent = len(tokens) - 1
            drafts.append(Draft(tokens, parents))
        return drafts
'''
DRAFTERS = ["chain", "tree", "lookup", "adaptive"]
WITH_LAYERS = ["medusa", "model"]
PROMPTS = [[5, 6, 7, 8] * 5, [9, 10, 11], [3 + 7 * i % 90 for i in range(26)], [5, 6, 7, 8] * 5 + [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)

PAIRS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seed": SAMPLED,
    "top_k and top_p": replace(SAMPLED, top_k=20, top_p=0.8),
    "min_p": replace(SAMPLED, min_p=0.1),
    "penalties": replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    "sampled penalties": replace(SAMPLED, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5),
    "logit_bias": replace(SAMPLED, logit_bias={5: 3.0, 6: -50.0, 40: 2.0}),
    "allowed_token_ids": replace(SAMPLED, allowed_token_ids=[5, 6, 7, 8, 9, 10]),
    "logprobs": replace(GREEDY, logprobs=3),
    "sampled logprobs": replace(SAMPLED, logprobs=2),
    "prompt_logprobs": replace(GREEDY, prompt_logprobs=2),
    "n": replace(SAMPLED, n=3),
    "best_of": replace(SAMPLED, n=2, best_of=4),
    "stop_token_ids": replace(GREEDY, stop_token_ids=list(range(0, 128, 9))),
    "min_tokens": replace(GREEDY, stop_token_ids=list(range(0, 128, 3)), min_tokens=7),
    "max_tokens 1": replace(GREEDY, max_tokens=1),
    "max_tokens 2": replace(GREEDY, max_tokens=2),
    "until max_model_len": replace(GREEDY, max_tokens=None),
    "processors": replace(GREEDY, processors={"no_repeat_ngram": 2}),
    "delta": replace(GREEDY, output_kind="delta"),
}
PAIRS_OF_LAYERS = [
    "greedy",
    "penalties",
    "logprobs",
    "prompt_logprobs",
    "stop_token_ids",
    "min_tokens",
]
CASES = [(pair, drafter) for drafter in DRAFTERS for pair in PAIRS]
CASES += [(pair, drafter) for drafter in WITH_LAYERS for pair in PAIRS_OF_LAYERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pairs")
    model = save_tiny_model(directory, tiny_config("llama"))
    write_heads(directory / "heads", model)
    write_draft_model(directory / "draft", model)
    (directory / "knowing.py").write_text(KNOWING)
    (directory / "answers.json").write_text("[]")
    return directory


def write_heads(directory: Path, model: Any, num_heads: int = 3) -> None:
    """Unembeddings that take the target's states to the tokens after the next, by least squares over its answers."""
    states, tokens = [], []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24)
            known = model(ids, output_hidden_states=True).hidden_states[-1][0]
            states.append(known[: -1 - num_heads])
            tokens.append(torch.stack([ids[0, k + 2 : ids.shape[1] - num_heads + k + 1] for k in range(num_heads)]))
        seen, wanted = torch.cat(states), torch.cat(tokens, dim=1)
        one_hot = torch.nn.functional.one_hot(wanted, model.config.vocab_size).float()
        tensors = {
            f"{k}.0.weight": torch.linalg.lstsq(seen, one_hot[k]).solution.T.contiguous() for k in range(num_heads)
        }
    directory.mkdir()
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 0}))


def write_draft_model(directory: Path, model: Any) -> None:
    """The target with some noise in its weights; `model` is changed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator) * parameter.std())
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def make(folder: Path) -> Iterator[Callable[..., LLM]]:
    """An engine with all drafters (`with_layers`: those that have layers or heads), none of them the default; each set
    of sections is built once."""
    created: dict[str, LLM] = {}

    def build(with_layers: bool = False, **sections: Any) -> LLM:
        name = json.dumps([with_layers, sections], sort_keys=True)
        if name not in created:
            knowing = {"num_tokens": 6, "answers": str(folder / "answers.json"), "length": "fixed"}
            drafters = {
                "chain": {"name": f"{folder}/knowing.py:Chain", **knowing},
                "tree": {"name": f"{folder}/knowing.py:Tree", **knowing},
                "lookup": {"name": "ngram", "num_tokens": 5, "min_match": 1, "length": "fixed"},
                "adaptive": {"name": f"{folder}/knowing.py:Chain", **knowing, "length": "adaptive"},
            }
            if with_layers:
                drafters = {
                    "medusa": {"name": "medusa", "num_tokens": 3, "path": str(folder / "heads"), "length": "fixed"},
                    "model": {
                        "name": "draft_model",
                        "num_tokens": 4,
                        "path": str(folder / "draft"),
                        "length": "fixed",
                    },
                }
            created[name] = LLM(
                model={"path": str(folder), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 80},
                cache={"block_size": 4, "num_blocks": 200} | sections.get("cache", {}),
                executor={"threads": 1},
                scheduler=sections.get("scheduler", {}),
                speculative={"drafters": drafters, "default": None},
                logits_processors={"no_repeat_ngram": {}},
            )
        return created[name]

    yield build
    for llm in created.values():
        llm.shutdown()


def run(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def plain(llm: LLM, folder: Path, params: SamplingParams) -> list[Any]:
    """Without drafts; the drafters are told what came."""
    outputs = run(llm, params)
    known = [output.prompt_token_ids + completion.token_ids for output in outputs for completion in output.outputs]
    (folder / "answers.json").write_text(json.dumps(known))
    return outputs


def check_same(expected: list[Any], found: list[Any]) -> None:
    for left, right in zip(expected, found, strict=True):
        assert right.error is None
        assert right.metrics.drafter_error is None
        for a, b in zip(left.outputs, right.outputs, strict=True):
            assert (a.token_ids, a.finish_reason, a.stop_reason) == (b.token_ids, b.finish_reason, b.stop_reason)
            check_logprobs(a.logprobs, b.logprobs)
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
        check_logprobs(left.prompt_logprobs, right.prompt_logprobs)


def check_logprobs(left: list[Any] | None, right: list[Any] | None) -> None:
    assert (left is None) == (right is None)
    for a, b in zip(left or [], right or [], strict=True):
        assert (a is None) == (b is None)
        for token, entry in (a or {}).items():
            assert entry.logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.mark.parametrize(("pair", "drafter"), CASES)
def test_a_pair_gives_what_plain_decoding_gives(
    make: Callable[..., LLM], folder: Path, pair: str, drafter: str
) -> None:
    llm = make(drafter in WITH_LAYERS)
    expected = plain(llm, folder, PAIRS[pair])
    found = run(llm, replace(PAIRS[pair], speculation=drafter))
    check_same(expected, found)
    # A round gives at least one token, so the last two leave no room; the clock rules what `adaptive` does.
    if drafter != "adaptive" and pair not in ("max_tokens 1", "max_tokens 2"):
        assert sum(output.metrics.num_drafted for output in found) > 0


def test_adaptive_drafts_among_all_that_it_does(make: Callable[..., LLM], folder: Path) -> None:
    """So the comparisons above are none of plain decoding with itself. In a fresh engine, which knows no cost yet."""
    expected = plain(make(), folder, GREEDY)
    llm = make(scheduler={"max_num_seqs": 5})
    accepted = 0
    for _ in range(10):
        found = run(llm, replace(GREEDY, speculation="adaptive"))
        check_same(expected, found)
        accepted += sum(output.metrics.num_accepted for output in found)
        if accepted:
            break
    assert accepted > 0


MEMORY: dict[str, dict[str, Any]] = {
    "chunked prefill": {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 4}},
    "whole prompts": {"scheduler": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}},
    "preemption by recomputing": {"cache": {"num_blocks": 24, "prefix_caching": False}},
    "preemption by swapping": {"cache": {"num_blocks": 24, "prefix_caching": False, "swap_gib": 0.001}},
    "priorities": {"scheduler": {"name": "priority", "max_num_seqs": 2}},
}


@pytest.mark.parametrize("drafter", WITH_LAYERS)
def test_layers_guess_some_right_and_some_wrong(make: Callable[..., LLM], drafter: str) -> None:
    """So the comparisons above have both."""
    found = run(make(True), replace(GREEDY, speculation=drafter))
    drafted, accepted = (
        sum(counts) for counts in zip(*((o.metrics.num_drafted, o.metrics.num_accepted) for o in found), strict=True)
    )
    assert 0 < accepted < drafted


MEMORY_CASES = [(GREEDY, drafter) for drafter in [*DRAFTERS, *WITH_LAYERS]]
MEMORY_CASES += [(SAMPLED, drafter) for drafter in [*DRAFTERS, "medusa"]]


@pytest.mark.parametrize(
    ("params", "drafter"), MEMORY_CASES, ids=lambda v: v if isinstance(v, str) else "seed" if v.seed else "greedy"
)
@pytest.mark.parametrize("memory", MEMORY)
def test_memory_and_budgets_change_nothing(
    make: Callable[..., LLM], folder: Path, memory: str, params: SamplingParams, drafter: str
) -> None:
    expected = plain(make(), folder, params)
    llm = make(drafter in WITH_LAYERS, **MEMORY[memory])
    found = run(llm, replace(params, speculation=drafter))
    check_same(expected, found)
    assert llm.engine.cache_statistics().num_used_blocks == 0
    if memory.startswith("preemption"):
        assert sum(output.metrics.num_preemptions for output in found) > 0


@pytest.mark.parametrize("drafter", [*DRAFTERS, *WITH_LAYERS])
def test_cached_prefixes_hold_what_drafts_left_right(make: Callable[..., LLM], folder: Path, drafter: str) -> None:
    """A prompt that goes on where an answer ended finds its blocks in the cache, and the answer goes on the same."""
    llm = make(drafter in WITH_LAYERS)
    llm.engine.reset_prefix_cache()
    expected = plain(llm, folder, replace(GREEDY, max_tokens=40))
    llm.engine.reset_prefix_cache()
    first = run(llm, replace(GREEDY, speculation=drafter))
    longer = [output.prompt_token_ids + output.outputs[0].token_ids for output in first]
    second = run(llm, replace(GREEDY, speculation=drafter), longer)
    assert all(output.num_cached_tokens > 0 for output in second)
    for whole, head, tail in zip(expected, first, second, strict=True):
        assert head.outputs[0].token_ids + tail.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize("drafter", [*DRAFTERS, *WITH_LAYERS])
def test_a_request_that_is_aborted_leaves_nothing_behind(make: Callable[..., LLM], folder: Path, drafter: str) -> None:
    llm = make(drafter in WITH_LAYERS)
    expected = plain(llm, folder, GREEDY)
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, replace(GREEDY, speculation=drafter))
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort_request(["0", "2"])
    last = {}
    while llm.engine.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.engine.step()}
    check_same([expected[1], expected[3]], [last["1"], last["3"]])
    assert llm.engine.cache_statistics().num_used_blocks == 0


def test_beams_are_searched_without_drafts(make_llm: Callable[..., LLM]) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    drafted = make_llm(speculative={"drafters": {"it": {"name": "ngram", "min_match": 1, "length": "fixed"}}})
    expected = make_llm().beam_search(prompts, params)
    for left, right in zip(expected, drafted.beam_search(prompts, params), strict=True):
        assert [beam.tokens for beam in left.sequences] == [beam.tokens for beam in right.sequences]
    assert drafted.engine.speculation_totals() == {}


STORY = "Once upon a time, there was a little girl named Lily. She liked to play. Once upon a time, there was a"


TEXTS = {
    "stop": replace(GREEDY, max_tokens=60, stop=["Lily", "She"]),
    "kept stop": replace(GREEDY, max_tokens=60, stop=["e l", "y. "], include_stop_str_in_output=True, logprobs=0),
    "late stop": replace(GREEDY, max_tokens=60, stop=["the"], min_tokens=12),
    "bad words": replace(GREEDY, max_tokens=40, bad_words=["Lily", "little girl"]),
    "sampled": replace(SAMPLED, max_tokens=40, bad_words=["the"], stop=["."], seed=3),
}
TEXT_CASES = [(text, "ngram") for text in TEXTS] + [("kept stop", "draft_model"), ("bad words", "draft_model")]


@pytest.mark.parametrize(("text", "name"), TEXT_CASES)
def test_text_is_the_same(make_stories: Callable[..., LLM], story_model: Path, text: str, name: str) -> None:
    params = TEXTS[text]
    drafter: dict[str, Any] = {"name": name, "num_tokens": 6, "length": "fixed"}
    if name == "draft_model":
        drafter |= {"path": str(story_model), "dtype": "bfloat16"}
    llm = make_stories(speculative={"drafters": {"it": drafter}})
    expected = llm.generate([STORY], replace(params, speculation="off"), use_tqdm=False)
    found = llm.generate([STORY], params, use_tqdm=False)
    check_same(expected, found)
    assert expected[0].outputs[0].text == found[0].outputs[0].text
    assert found[0].metrics.num_drafted > 0
