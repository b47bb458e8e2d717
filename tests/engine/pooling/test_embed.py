"""Embeddings of a decoder, against transformers' own hidden states."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, AsyncLLMEngine, LLMEngine, PoolingParams, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.engine.pooling import scores
from dovetail.engine.pooling.outputs import PoolingRequestOutput
from dovetail.testing.tiny_encoders import save_tiny_encoder
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

MakeLLM = Callable[..., LLM]
PROMPTS = [[(7 * i + s) % 120 for i in range(length)] for s, length in ((0, 20), (3, 1), (5, 33), (11, 8))]


def states(tiny_llama: tuple[Path, Any], prompt: list[int]) -> torch.Tensor:
    """[tokens, hidden_size], as transformers computes them."""
    with torch.no_grad():
        hidden: torch.Tensor = tiny_llama[1].model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden


def cosine(found: list[float], expected: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(torch.tensor(found), expected, dim=0).item()


@pytest.mark.parametrize("pooler", ["last", "mean", "cls"])
def test_embeddings_are_those_of_transformers(pooler: str, make_llm: MakeLLM, tiny_llama: tuple[Path, Any]) -> None:
    outputs = make_llm(pooling={"embed": pooler}).embed(PROMPTS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        hidden = states(tiny_llama, prompt)
        expected = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooler]
        assert cosine(output.outputs.embedding, expected) > 1 - 1e-6
        assert output.outputs.hidden_size == 64
        assert output.prompt_token_ids == prompt
        assert sum(x * x for x in output.outputs.embedding) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("pooler", ["last", "mean", "cls"])
def test_chunks_of_a_prompt_do_not_matter(pooler: str, make_llm: MakeLLM) -> None:
    found = []
    for chunk in (1, 7, 4096):
        scheduler = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 4)}
        llm = make_llm(pooling={"embed": pooler}, scheduler=scheduler)
        found.append([o.outputs.embedding for o in llm.embed(PROMPTS, use_tqdm=False)])
    for other in found[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(found[0]), rtol=0, atol=2e-6)


def test_every_token_has_a_vector(make_llm: MakeLLM, tiny_llama: tuple[Path, Any]) -> None:
    llm = make_llm(scheduler={"max_num_batched_tokens": 7, "max_num_seqs": 4})
    params = PoolingParams(task="token_embed", normalize=False)
    for prompt, output in zip(PROMPTS, llm.encode(PROMPTS, params, use_tqdm=False), strict=True):
        torch.testing.assert_close(output.outputs.data, states(tiny_llama, prompt), rtol=0, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_normalized_again(make_llm: MakeLLM) -> None:
    llm = make_llm()
    whole = llm.encode(PROMPTS[0], PoolingParams(normalize=False), use_tqdm=False)[0].outputs.data
    (cut,) = llm.embed(PROMPTS[0], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    expected = whole[:8] / whole[:8].norm()
    torch.testing.assert_close(torch.tensor(cut.outputs.embedding), expected, rtol=0, atol=1e-6)


def test_the_score_of_two_texts_is_the_cosine_of_their_embeddings(make_llm: MakeLLM) -> None:
    llm = make_llm()
    first, second, third = (torch.tensor(o.outputs.embedding) for o in llm.embed(PROMPTS[:3], use_tqdm=False))
    found = [o.outputs.score for o in llm.score(PROMPTS[0], PROMPTS[1:3], use_tqdm=False)]
    assert found == pytest.approx([float(first @ second), float(first @ third)], abs=1e-6)


def test_a_text_that_goes_with_many_is_embedded_once(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    added, add = [], llm.engine.add_request

    def count(*args: Any, **keywords: Any) -> None:
        added.append(args)
        add(*args, **keywords)

    monkeypatch.setattr(llm.engine, "add_request", count)
    assert len(llm.score(PROMPTS[0], PROMPTS, use_tqdm=False)) == len(PROMPTS)
    assert len(added) == 1 + len(PROMPTS)


def test_no_cosine_exceeds_1() -> None:
    """By rounding, the quotient of sum and lengths does."""
    vectors = [[0.1 * i, 0.7, 1.1] for i in range(100)]
    assert any(math.fsum(x * x for x in v) / math.hypot(*v) ** 2 > 1 for v in vectors)
    assert all(1 - 1e-12 < scores.cosine(v, v) <= 1 for v in vectors)
    assert all(-1 <= scores.cosine(v, [-x for x in v]) < 1e-12 - 1 for v in vectors)


def test_one_engine_embeds_and_generates_at_once(make_llm: MakeLLM, tiny_llama: tuple[Path, Any]) -> None:
    """Steps with requests of both kinds, of the same prompts."""
    llm = make_llm(scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 8})
    sampling = SamplingParams(temperature=0, max_tokens=8)
    alone = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    llm.reset_prefix_cache()
    engine = llm.engine
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"generate-{index}", {"prompt_token_ids": prompt}, sampling)
        engine.add_request(f"embed-{index}", {"prompt_token_ids": prompt}, PoolingParams())
    last = finish(engine)
    assert [last[f"generate-{index}"].outputs[0].token_ids for index in range(4)] == alone
    for index, prompt in enumerate(PROMPTS):
        vector = PoolingRequestOutput.from_request(last[f"embed-{index}"]).outputs.data
        assert cosine(vector.tolist(), states(tiny_llama, prompt)[-1]) > 1 - 1e-6


def finish(engine: LLMEngine) -> dict[str, Any]:
    """Last outputs by request id."""
    last = {}
    while engine.has_unfinished_requests():
        last.update({output.request_id: output for output in engine.step() if output.finished})
    return last


def test_the_last_state_reads_the_prefix_cache_and_the_mean_does_not(
    make_llm: MakeLLM, tiny_llama: tuple[Path, Any]
) -> None:
    prompt = PROMPTS[2]
    for pooler, num_cached in (("last", 32), ("mean", 0)):
        llm = make_llm(pooling={"embed": pooler})
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        (output,) = llm.embed(prompt, use_tqdm=False)
        hidden = states(tiny_llama, prompt)
        assert output.num_cached_tokens == num_cached
        assert cosine(output.outputs.embedding, hidden[-1] if pooler == "last" else hidden.mean(0)) > 1 - 1e-6


@pytest.mark.parametrize("swap_gib", [0, 0.001])
def test_a_preempted_request_starts_again(swap_gib: float, make_llm: MakeLLM, tiny_llama: tuple[Path, Any]) -> None:
    """Blocks are short, so that requests that generate and those that are pooled push each other out."""
    cache = {"num_blocks": 68, "prefix_caching": False, "swap_gib": swap_gib}
    scheduler = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "max_num_partial_prefills": 8}
    llm = make_llm(cache=cache, scheduler=scheduler, pooling={"embed": "mean"})
    prompts = [[(5 * i + s) % 120 for i in range(60)] for s in range(6)]
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(f"g{index}", {"prompt_token_ids": prompt[:20]}, SamplingParams(max_tokens=60))
        llm.engine.add_request(f"e{index}", {"prompt_token_ids": prompt}, PoolingParams())
    last = finish(llm.engine)
    assert sum(output.metrics.num_preemptions for output in last.values()) > 0
    for index, prompt in enumerate(prompts):
        vector = PoolingRequestOutput.from_request(last[f"e{index}"]).outputs.data
        assert cosine(vector.tolist(), states(tiny_llama, prompt).mean(0)) > 1 - 1e-6


def test_a_prompt_may_be_as_long_as_the_model(make_llm: MakeLLM) -> None:
    llm = make_llm(model={"max_model_len": 32})
    assert llm.embed([1] * 32, use_tqdm=False)[0].outputs.hidden_size == 64
    with pytest.raises(RequestError, match="33 tokens, but max_model_len is 32: shorten it to 32"):
        llm.embed([1] * 33, use_tqdm=False)


def test_coroutines_are_given_one_output(make_llm: MakeLLM) -> None:
    llm = make_llm()
    (expected,) = llm.embed(PROMPTS[0], use_tqdm=False)

    async def ask() -> list[PoolingRequestOutput]:
        with AsyncLLMEngine(llm.engine) as engine:
            return [output async for output in engine.encode({"prompt_token_ids": PROMPTS[0]}, PoolingParams())]

    (output,) = asyncio.run(ask())
    assert output.outputs.data.tolist() == expected.outputs.embedding
    assert output.finished


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.embed([[]]), "the prompt is empty"),
        (lambda llm: llm.embed([1], pooling_params=PoolingParams(dimensions=65)), "embeddings of this model have 64"),
        (lambda llm: llm.embed([1], pooling_params=SamplingParams()), "must be PoolingParams"),
        (lambda llm: llm.generate([1], PoolingParams()), "generate takes SamplingParams"),
        (lambda llm: llm.classify([1]), "the checkpoint has no score head"),
        (lambda llm: llm.reward([1]), "the checkpoint has no score head"),
        (lambda llm: llm.embed([1], pooling_params=PoolingParams(task="classify")), "ask for the task 'classify'"),
        (lambda llm: llm.embed([1], pooling_params=PoolingParams(use_activation=True)), "use_activation is for scores"),
        (lambda llm: llm.score([[1]], [[1], [2], [3]][:0]), "one side has none"),
        (lambda llm: llm.score([[1], [2]], [[1], [2], [3]]), "got 2 and 3"),
    ],
)
def test_what_cannot_be_is_refused(ask: Callable[[LLM], Any], message: str, make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match=message):
        ask(make_llm())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dimensions": 0}, "dimensions must be None or an integer of at least 1"),
        ({"dimensions": True}, "dimensions must be"),
        ({"normalize": 1}, "normalize must be None, True or False"),
        ({"use_activation": "softmax"}, "use_activation must be"),
        ({"task": "summarize"}, "task must be None or one of embed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be"),
    ],
)
def test_values_that_nothing_serves_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PoolingParams(**given)


def test_a_task_that_the_config_switches_off_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match=r"pooling\.embed is null"):
        make_llm(pooling={"embed": None}).embed([1])


def test_encoders_are_pooled_by_their_mean(tmp_path: Path, make_llm: MakeLLM) -> None:
    encoder = save_tiny_encoder(tmp_path)
    prompts = [[5, 9, 13], [7] * 12, [3]]
    with LLM(model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"}) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        with pytest.raises(RequestError, match="the model is an encoder"):
            llm.generate([1], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            hidden = encoder(torch.tensor([prompt])).last_hidden_state[0]
        assert cosine(output.outputs.embedding, hidden.mean(0)) > 1 - 1e-6


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_files_of_sentence_transformers_choose_the_pooler(
    config: dict[str, Any], mode: str, tmp_path: Path, make_llm: MakeLLM
) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    llm = make_llm(model={"path": str(tmp_path)})
    assert llm.engine.facts.pooling.poolers["embed"] == mode


def test_a_way_of_pooling_that_nobody_has_is_refused(tmp_path: Path, make_llm: MakeLLM) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "models.Pooling"}]))
    config = json.loads((tmp_path / "config.json").read_text()) | {"pooling_mode": "max"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = make_llm(model={"path": str(tmp_path)})
    with pytest.raises(RequestError, match="no installed pooler serves this model"):
        llm.embed([1])


def test_ranks_that_share_the_model_pool_once(make_llm: MakeLLM) -> None:
    (expected,) = make_llm().embed(PROMPTS[0], use_tqdm=False)
    shared = make_llm(executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1})
    (output,) = shared.embed(PROMPTS[0], use_tqdm=False)
    assert output.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=1e-5)


def test_a_pooler_that_raises_fails_its_request_alone(make_llm: MakeLLM, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    llm = make_llm(pooling={"token_embed": f"{tmp_path}/broken.py:Broken"})
    llm.engine.add_request("broken", {"prompt_token_ids": PROMPTS[0]}, PoolingParams(task="token_embed"))
    llm.engine.add_request("sound", {"prompt_token_ids": PROMPTS[0]}, PoolingParams())
    last = finish(llm.engine)
    assert "pooler Broken failed the request: RuntimeError: no more" in str(last["broken"].error)
    assert last["sound"].pooled is not None


BROKEN = """
from dovetail.contracts.pooling import Pooler, PoolerCapabilities, PoolingState


class Broken(Pooler):
    contract = (1, 0)
    capabilities = PoolerCapabilities(tasks=frozenset({"token_embed"}))

    def start(self, num_tokens):
        return State()


class State(PoolingState):
    def add(self, hidden, positions):
        raise RuntimeError("no more")

    def finish(self):
        return None
"""
