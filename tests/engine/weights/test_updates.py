"""After an update an engine is as one that was made with the new checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, AsyncLLMEngine, LoRARequest, SamplingParams
from dovetail.testing.tiny_adapters import save_adapter
from tests.engine.weights.conftest import GREEDY, PROMPTS, logprobs_of, send, told


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"quantization": "q8"}},
        {"model": {"quantization": "q4"}},
        {"model": {"quantization": "int8", "dtype": "bfloat16"}},
        {"model": {"operators": None}},
        {"reproducibility": "strict"},
        {"executor": {"name": "gpu", "device": "null"}},
    ],
    ids=("float32", "q8", "q4", "int8", "plain", "strict", "captured"),
)
def test_outputs_are_those_of_a_fresh_engine(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], sections: dict[str, object]
) -> None:
    """Native replay, captured graphs and packed kernels included."""
    llm = make(**sections)
    old = told(llm)
    assert send(llm, new_weights).version == 1
    assert told(llm) == told(make("new", **sections)) != old


def test_a_checkpoint_on_disk(make: Callable[..., LLM], checkpoints: Mapping[str, Path]) -> None:
    llm = make(weight_transport="disk")
    told(llm)
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"path": str(checkpoints["new"])})
    report = llm.finish_weight_update()
    assert told(llm) == told(make("new"))
    assert report == llm.weights()


def test_every_rank_takes_its_share(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    shared = {"name": "multiproc", "tensor_parallel": 2, "threads": 1}
    llm = make(executor=shared)
    old = told(llm)
    send(llm, new_weights)
    found = told(llm)
    expected = told(make("new"))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected] != [tokens for tokens, _ in old]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_kv_of_old_weights_is_never_found(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    """Equal prompts, cached before the update: nothing is reused, and after it the new pages are."""
    llm = make()
    told(llm)
    cached = [one.num_cached_tokens for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    send(llm, new_weights)
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert (cached[0] > 0, first[0].num_cached_tokens) == (True, 0)
    assert told(llm) == told(make("new"))
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0].num_cached_tokens == cached[0]


def test_outputs_name_version_and_checksum(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    llm = make()

    def named() -> tuple[int, str]:
        output = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), use_tqdm=False)[0]
        return output.weight_version, output.weight_checksum

    assert named() == (0, "")
    report = send(llm, new_weights, weight_version=7)
    assert named() == (7, report.checksum)
    assert len(report.checksum) == 32
    assert send(llm, new_weights, num_buckets=1).checksum == report.checksum
    assert named() == (8, report.checksum)


def test_some_weights_alone(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    """A partial update leaves the others, and its checksum follows from what was there before."""
    llm = make()
    first = send(llm, {"model.norm.weight": new_weights["model.norm.weight"]}, num_buckets=1, partial=True)
    rest = {name: tensor for name, tensor in new_weights.items() if name != "model.norm.weight"}
    second = send(llm, rest, partial=True)
    assert told(llm) == told(make("new"))
    assert len({first.checksum, second.checksum, send(llm, new_weights).checksum}) == 3


def test_another_update_follows(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], checkpoints: Mapping[str, Path]
) -> None:
    from safetensors.torch import load_file

    llm = make(model={"quantization": "q8"})
    before = told(llm)
    send(llm, new_weights)
    send(llm, load_file(checkpoints["old"] / "model.safetensors"))
    assert told(llm) == before


def test_tensors_may_change_once_they_were_handed_over(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]
) -> None:
    """A trainer goes on in its own memory, in another dtype."""
    llm = make()
    mine = {name: tensor.to(torch.float64) for name, tensor in new_weights.items()}
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": list(mine.items())})
    for tensor in mine.values():
        tensor.zero_()
    llm.finish_weight_update()
    assert told(llm) == told(make("new"))


def test_an_async_engine_is_updated_between_steps(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], checkpoints: Mapping[str, Path]
) -> None:
    model = {"path": str(checkpoints["old"]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256}
    sections: dict[str, Any] = {"cache": {"block_size": 4, "num_blocks": 400}, "executor": {"threads": 1}}

    async def updated(engine: AsyncLLMEngine) -> list[int]:
        await engine.init_weight_transfer_engine()
        assert await engine.start_weight_update(weight_version=3) == 3
        await engine.update_weights({"weights": dict(new_weights)})
        assert await engine.finish_weight_update() == await engine.weights()
        outputs = [output async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)]
        assert outputs[-1].weight_version == 3
        return list(outputs[-1].outputs[0].token_ids)

    with AsyncLLMEngine.from_config(model=model, weight_transport="in_process", **sections) as engine:
        found = asyncio.run(updated(engine))
    assert found == told(make("new"))[0][0]


@pytest.mark.parametrize("sleeps", [False, True], ids=("awake", "discarded"))
def test_requests_that_a_pause_keeps_go_on_with_the_new_weights(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], sleeps: bool
) -> None:
    """Their tokens stay, all KV is computed again, and none of the old is found."""
    llm, fresh = make(), make("new")
    engine = llm.engine
    engine.add_request("kept", PROMPTS[0], GREEDY)
    while engine.token_progress(["kept"]).num_output_tokens < 3:
        engine.step()
    engine.pause("keep")
    engine.add_request("late", PROMPTS[0], GREEDY)
    num_kept = engine.token_progress(["kept"]).num_output_tokens
    if sleeps:
        engine.sleep(2)
        engine.wake_up(for_update=True)
    send(llm, new_weights)
    if sleeps:
        engine.wake_up()
    assert engine.cache_statistics().num_used_blocks == 0
    engine.resume()
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    kept = outputs["kept"].outputs[0]
    rest = SamplingParams(temperature=0, max_tokens=8 - num_kept, logprobs=0)
    expected = told(fresh, [PROMPTS[0] + list(kept.token_ids[:num_kept])], rest)[0]
    assert (kept.token_ids[num_kept:], logprobs_of(kept)[num_kept:]) == (expected[0], pytest.approx(expected[1]))
    assert list(outputs["late"].outputs[0].token_ids) == told(fresh, PROMPTS[:1])[0][0] != list(kept.token_ids)
    assert outputs["kept"].weight_version == 0
    assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens > 0, "their KV is named like others'"


@pytest.mark.parametrize("has", ["completions", "drafts", "an adapter"])
def test_requests_that_are_kept_go_on_with_what_they_have(
    make: Callable[..., LLM],
    new_weights: Mapping[str, torch.Tensor],
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    has: str,
) -> None:
    """Each later token has the log probability that the new weights give it behind the tokens before it."""
    sections: dict[str, Any] = {"lora": {"enabled": True}} if has == "an adapter" else {}
    drafters = {"mine": {"name": "ngram", "num_tokens": 3, "length": "fixed"}}
    llm = make(**sections, **({"speculative": {"drafters": drafters}} if has == "drafts" else {}))
    adapter = LoRARequest("a", 0, str(save_adapter(tmp_path, checkpoints["old"], 1))) if sections else None
    params = SamplingParams(n=2 if has == "completions" else 1, seed=1, max_tokens=16, ignore_eos=True, logprobs=0)
    engine = llm.engine
    engine.add_request("kept", PROMPTS[0] * 3, params, lora_request=adapter)
    while engine.token_progress(["kept"]).num_output_tokens < 4:
        engine.step()
    engine.pause("keep")
    num_kept = engine.token_progress(["kept"]).num_output_tokens
    send(llm, new_weights)
    engine.resume()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for completion in outputs[-1].outputs:
        tokens = list(completion.token_ids)
        (scored,) = make("new", **sections).generate(
            [PROMPTS[0] * 3 + tokens], scoring, lora_request=adapter, use_tqdm=False
        )
        positions = (scored.prompt_logprobs or [])[-len(tokens) :]
        expected = [at[token].logprob for token, at in zip(tokens, positions, strict=True) if at is not None]
        assert logprobs_of(completion)[num_kept:] == pytest.approx(expected[num_kept:], abs=1e-5)
        assert len(tokens) == 16 > num_kept
