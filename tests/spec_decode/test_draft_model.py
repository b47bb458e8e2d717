"""Draft models through the whole engine. The target as its own draft model must have every draft accepted: whatever is
wrong with its keys and values, positions or probabilities costs acceptance, and nothing else would show it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError
from dovetail.engine.explanation import explain
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

from .conftest import TinyPair, greedy

NUM_TOKENS = 20
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=0.9, seed=3)

PLUGINS = '''
"""Draft models that write down what they propose, or that break."""

import json
from pathlib import Path

from dovetail.contracts.draft_length import AdaptiveDraftLength
from dovetail.spec_decode.draft_model import DraftModelDrafter, DraftModelOptions


class AllThatCanBe(AdaptiveDraftLength):
    contract = (1, 0)

    def observe(self, report):
        pass

    def ask(self, question):
        return question.most

    def keep(self, offered):
        return [len(draft.token_ids) for draft in offered.drafts]

    def idle_drafters(self, num_requests):
        return ()

    def forget(self, seq_ids):
        pass


class LoggedOptions(DraftModelOptions):
    log: Path | None = None


class Logged(DraftModelDrafter):
    Options = LoggedOptions

    def propose(self, batch):
        drafts = super().propose(batch)
        with self.options.log.open("a") as file:
            for request, draft in zip(batch.requests, drafts):
                if draft is not None:
                    entry = request.token_ids.tolist(), list(draft.token_ids), draft.confidence
                    print(json.dumps(entry), file=file)
        return drafts


class Breaks(DraftModelDrafter):
    rounds = 0

    def propose(self, batch):
        Breaks.rounds += 1
        if Breaks.rounds == 4:
            raise RuntimeError("out of ideas")
        return super().propose(batch)
'''


class Pair(TinyPair):
    """With the tokens that transformers generates for some prompts."""

    def __init__(self, directory: Path):
        super().__init__(directory, PLUGINS)
        draw = random.Random(2)
        self.prompts = [[draw.randrange(3, 128) for _ in range(draw.choice([3, 9, 30]))] for _ in range(16)]
        self.answers = [greedy(self.target_model, prompt, NUM_TOKENS) for prompt in self.prompts]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def make_llm(pair: Pair) -> Iterator[Callable[..., LLM]]:
    """An `LLM` over the tiny target with one drafter; no block may be held after the test."""
    created: list[LLM] = []

    def make(path: Path | None = None, *, name: str = "draft_model", num_tokens: int = 4, **sections: Any) -> LLM:
        drafter = {
            "name": name,
            "path": str(path or pair.target),
            "dtype": "float32",
            "num_tokens": num_tokens,
            "length": "fixed",
        }
        model = {"path": str(pair.target), "tokenizer_mode": "none", "dtype": "float32"}
        llm = LLM(
            model=model | sections.pop("model", {}),
            cache={"block_size": 4, "num_blocks": 400} | sections.pop("cache", {}),
            executor={"threads": 1} | sections.pop("executor", {}),
            speculative={"drafters": {"it": drafter | sections.pop("options", {})}},
            **sections,
        )
        created.append(llm)
        return llm

    yield make
    for llm in created:
        assert llm.engine.cache_statistics().num_used_blocks == 0
        llm.shutdown()


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_all_accepted(outputs: list[Any]) -> None:
    for output in outputs:
        assert output.metrics.drafter_error is None
        assert output.metrics.num_drafted > 0
        assert output.metrics.num_accepted == output.metrics.num_drafted


@pytest.mark.parametrize("attention", ["reference", "sdpa", "auto"])
@pytest.mark.parametrize("count", [1, 16])
def test_greedy_tokens_do_not_change(pair: Pair, make_llm: Callable[..., LLM], attention: str, count: int) -> None:
    llm = make_llm(pair.draft, options={"attention": attention})
    outputs = llm.generate(pair.prompts[:count], PARAMS)
    assert tokens_of(outputs) == pair.answers[:count]
    assert all(output.metrics.num_drafted > 0 for output in outputs)


def test_drafts_are_what_transformers_says_of_the_draft_model(
    pair: Pair, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    name = f"{pair.plugins}:Logged"
    llm = make_llm(
        pair.draft, name=name, options={"log": str(log)}, scheduler={"max_num_batched_tokens": 12, "max_num_seqs": 6}
    )
    llm.generate(pair.prompts[:6], PARAMS)
    rounds = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rounds) > 20
    for known, drafted, confidence in rounds:
        assert drafted == greedy(pair.draft_model, known, len(drafted))
        assert confidence is None


def test_its_confidence_is_the_draft_models_probability(
    pair: Pair, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    options = {"log": str(tmp_path / "log"), "length": "confidence", "min_confidence": 0.05}
    outputs = make_llm(pair.draft, name=f"{pair.plugins}:Logged", options=options).generate(pair.prompts[:6], PARAMS)
    assert tokens_of(outputs) == pair.answers[:6]
    for line in (tmp_path / "log").read_text().splitlines():
        known, drafted, confidence = json.loads(line)
        logits = pair.draft_model(torch.tensor([known + drafted])).logits[0, len(known) - 1 : -1]
        own = logits.softmax(-1).gather(1, torch.tensor(drafted)[:, None])[:, 0]
        assert confidence == pytest.approx(own.tolist(), rel=1e-3)


def test_an_unsure_draft_is_verified_in_part(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    counts = []
    for threshold in (0.0, 0.02, 1.0):
        llm = make_llm(pair.draft, options={"length": "confidence", "min_confidence": threshold})
        outputs = llm.generate(pair.prompts, PARAMS)
        assert tokens_of(outputs) == pair.answers
        counts.append(sum(output.metrics.num_drafted for output in outputs))
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "scheduler",
    [{"max_num_seqs": 16}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}],
    ids=["whole prompts", "chunks"],
)
def test_the_target_accepts_its_own_drafts(
    pair: Pair, make_llm: Callable[..., LLM], params: SamplingParams, scheduler: dict[str, int]
) -> None:
    outputs = make_llm(scheduler=scheduler).generate(pair.prompts, params)
    assert_all_accepted(outputs)
    if params is PARAMS:
        assert tokens_of(outputs) == pair.answers


def test_a_cached_prefix_holds_the_drafters_pages(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = pair.prompts[0] * 5
    first = llm.generate([prompt], PARAMS)
    again = llm.generate([prompt, [*prompt[:-2], 5, 6, 7]], PARAMS)
    assert all(output.num_cached_tokens > 8 for output in again)
    assert_all_accepted([*first, *again])


def test_requests_without_the_drafter_share_no_blocks_with_its_own(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = pair.prompts[0] * 5
    llm.generate([prompt], replace(PARAMS, speculation="off"))
    outputs = llm.generate([prompt], PARAMS)
    assert outputs[0].num_cached_tokens == 0
    assert_all_accepted(outputs)
    plain = llm.generate([prompt], replace(PARAMS, speculation="off"))
    assert plain[0].num_cached_tokens > 0


@pytest.mark.parametrize("swap_gib", [0, 0.01], ids=["recompute", "swap"])
def test_preempted_requests_come_back_with_their_pages(
    pair: Pair, make_llm: Callable[..., LLM], swap_gib: float
) -> None:
    llm = make_llm(cache={"num_blocks": 40, "swap_gib": swap_gib}, model={"max_model_len": 60})
    outputs = llm.generate(pair.prompts, PARAMS)
    assert tokens_of(outputs) == pair.answers
    assert_all_accepted(outputs)
    if swap_gib:
        assert llm.engine.cache_statistics().num_swapped_in_blocks > 0


def test_siblings_share_the_prompts_pages(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    outputs = make_llm().generate([pair.prompts[2]], replace(SAMPLED, n=4))
    assert len(outputs[0].outputs) == 4
    assert_all_accepted(outputs)


def test_a_seeded_request_repeats_in_any_batch(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(pair.draft)
    together = llm.generate(pair.prompts[:5], SAMPLED)
    alone = llm.generate(pair.prompts[:1], SAMPLED)
    assert tokens_of(alone) == tokens_of(together[:1])


def test_seeded_tokens_are_those_of_plain_decoding_where_the_length_adapts(
    pair: Pair, make_llm: Callable[..., LLM]
) -> None:
    # All that could be drafted is, so that the clock decides nothing here.
    llm = make_llm(pair.draft, options={"length": f"{pair.plugins}:AllThatCanBe"})
    drafted = llm.generate(pair.prompts[:5], SAMPLED)
    assert all(output.metrics.num_drafted for output in drafted)
    assert tokens_of(drafted) == tokens_of(llm.generate(pair.prompts[:5], replace(SAMPLED, speculation="off")))


def test_a_drafter_that_raises_loses_its_requests_and_spoils_no_blocks(
    pair: Pair, make_llm: Callable[..., LLM]
) -> None:
    llm = make_llm(name=f"{pair.plugins}:Breaks")
    prompt = pair.prompts[0] * 3
    broken = llm.generate([prompt], PARAMS)
    assert "out of ideas" in (broken[0].metrics.drafter_error or "")
    continued = [*prompt, *broken[0].outputs[0].token_ids]
    outputs = llm.generate([continued], PARAMS)
    assert outputs[0].num_cached_tokens == 0, "the drafter may have left anything in its pages"
    assert_all_accepted(outputs)
    again = llm.generate([continued], replace(PARAMS, speculation="off"))
    assert again[0].num_cached_tokens > 0, "the target's pages are good"


def test_two_tensor_parallel_ranks(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(executor={"name": "multiproc", "tensor_parallel": 2})
    outputs = llm.generate(pair.prompts[:4], PARAMS)
    assert tokens_of(outputs) == pair.answers[:4]
    assert_all_accepted(outputs)


def test_several_drafters_with_pages_serve_one_batch(pair: Pair) -> None:
    drafters = {
        "own": {
            "name": "draft_model",
            "path": str(pair.target),
            "dtype": "float32",
            "num_tokens": 4,
            "length": "fixed",
        },
        "other": {
            "name": "draft_model",
            "path": str(pair.draft),
            "dtype": "float32",
            "num_tokens": 2,
            "length": "fixed",
        },
        "lookup": {"name": "ngram", "min_match": 1},
    }
    llm = LLM(
        model={"path": str(pair.target), "tokenizer_mode": "none", "dtype": "float32"},
        cache={"block_size": 4, "num_blocks": 400},
        executor={"threads": 1},
        speculative={"drafters": drafters, "default": "own"},
    )
    names = [None, "other", "lookup", "off"]
    params = [replace(PARAMS, speculation=names[i % 4]) for i in range(16)]
    outputs = llm.generate(pair.prompts, params)
    assert tokens_of(outputs) == pair.answers
    assert_all_accepted(outputs[::4])
    assert all(output.metrics.num_drafted == 0 for output in outputs[3::4])
    llm.shutdown()


def test_an_unsure_draft_model_drafts_less(pair: Pair, make_llm: Callable[..., LLM]) -> None:
    outputs = make_llm(pair.draft, options={"stop_below": 0.5}).generate(pair.prompts, PARAMS)
    assert tokens_of(outputs) == pair.answers
    most = sum(output.metrics.num_drafted for output in make_llm(pair.draft).generate(pair.prompts, PARAMS))
    assert sum(output.metrics.num_drafted for output in outputs) < most / 2


def test_drafting_stops_where_the_draft_model_ends(pair: Pair, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tiny_config("llama", max_position_embeddings=16))
    assert model.config.max_position_embeddings == 16
    llm = make_llm(tmp_path)
    assert any("16 positions" in warning for warning in llm.engine.config.warnings)
    outputs = llm.generate(pair.prompts, PARAMS)
    assert tokens_of(outputs) == pair.answers
    for prompt, output in zip(pair.prompts, outputs, strict=True):
        assert output.metrics.num_drafted == output.metrics.num_accepted
        assert (output.metrics.num_drafted > 0) == (len(prompt) < 16)


def test_another_vocabulary_is_refused(pair: Pair, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama", vocab_size=96))
    with pytest.raises(ConfigError, match="vocabulary of 96 tokens, the target one of 128"):
        make_llm(tmp_path)


def test_another_tokenizer_is_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    for name, shift in (("target", 0), ("draft", 1)):
        save_tiny_model(tmp_path / name, tiny_config("llama"))
        write_tokenizer(tmp_path / name, shift)
    with pytest.raises(ConfigError, match="another tokenizer: 128 of 128 token ids mean other texts"):
        make_llm(tmp_path / "draft", model={"path": str(tmp_path / "target"), "tokenizer_mode": "auto"})


def write_tokenizer(directory: Path, shift: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{(i + shift) % 128}": i for i in range(128)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


def test_attention_for_a_drafter_without_layers_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="no attention layers of its own"):
        LLM(
            model={"path": str(pair.target), "tokenizer_mode": "none"},
            speculative={"drafters": {"it": {"name": "ngram", "attention": "sdpa"}}},
        )


def test_explain_says_what_the_drafter_takes(pair: Pair) -> None:
    drafter = {"name": "draft_model", "path": str(pair.draft), "dtype": "float32"}
    config = {
        "model": {"path": str(pair.target), "tokenizer_mode": "none", "dtype": "float32"},
        "speculative": {"drafters": {"it": drafter}},
    }
    explanation = explain(load_config(config))
    assert explanation.refusal is None
    assert explanation.estimate is not None
    # One layer of one head of 16 numbers, keys and values, four bytes each.
    assert explanation.estimate.draft_bytes_per_token == 2 * 16 * 4
    assert explanation.estimate.kv_bytes_per_token == 2 * 16 * 4 + 2 * 2 * 2 * 16 * 4
    assert explanation.estimate.draft_weight_bytes > 0
    shown = {value.key: value.value for value in explanation.values}
    assert shown["speculative.drafters.it.attention.name"] in ("paged_cpu", "sdpa")
    assert shown["speculative.drafters.it.family"] == "llama"


def test_a_trained_pair(make_llm: Callable[..., LLM], trained: Any) -> None:
    model = {"path": str(trained.target), "tokenizer_mode": "auto"}
    params = replace(PARAMS, max_tokens=64)
    prompts = ["Once upon a time there was", "Tom and Lily went to the park", "The little bird could not"]
    llm = make_llm(trained.draft, model=model, cache={"block_size": 16})
    outputs = llm.generate(prompts, params)
    plain = llm.generate(prompts, replace(params, speculation="off"))
    assert tokens_of(outputs) == tokens_of(plain)
    accepted = sum(output.metrics.num_accepted for output in outputs)
    steps = sum(64 - output.metrics.num_accepted for output in outputs)
    assert (accepted + steps) / steps > 1.6
