"""Requests with low-rank adapters: their tokens are those of a model with the adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dovetail import LLM, LoRARequest, SamplingParams

MakeLLM = Callable[..., LLM]
MakeAdapter = Callable[..., LoRARequest]
PROMPTS = [[3 + 7 * i % 120 for i in range(length)] for length in (9, 14, 22)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ON = {"enabled": True}


def tokens(llm: LLM, lora: Any = None, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank": 16, "targets": ("self_attn.q_proj", "mlp.down_proj")},
        {"targets": ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"), "strength": 1.0},
    ],
    ids=["every layer", "rslora", "rank 16 of some layers", "parts of fused layers"],
)
def test_tokens_are_those_of_merged_weights(
    make_llm: MakeLLM, make_adapter: MakeAdapter, make_merged: Callable[..., LLM], options: dict[str, Any]
) -> None:
    lora = make_adapter("pirate", **options)
    llm = make_llm(lora=ON)
    assert tokens(llm, lora) == tokens(make_merged(lora))
    assert tokens(llm) == tokens(make_llm()) != tokens(llm, lora)


@pytest.mark.parametrize("operators", ["auto", None])
def test_narrower_slots_hold_rounded_adapters(
    operators: str | None, make_llm: MakeLLM, make_adapter: MakeAdapter
) -> None:
    """Nothing else is rounded: the adapter that was rounded before has the same log probabilities in wide slots."""
    lora, rounded = make_adapter("pirate"), make_adapter("rounded")
    file = Path(rounded.lora_path) / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)

    def found(dtype: str, request: LoRARequest) -> list[float]:
        llm = make_llm(lora=ON | {"dtype": dtype}, model={"operators": operators})
        [output] = llm.generate(PROMPTS[:1], params, use_tqdm=False, lora_request=request)
        return [next(iter(place.values())).logprob for place in output.outputs[0].logprobs]

    narrow = found("bfloat16", lora)
    assert narrow == pytest.approx(found("float32", rounded), abs=2e-5)
    assert narrow != pytest.approx(found("float32", lora), abs=2e-5)


def test_several_adapters_and_the_base_are_in_one_batch(
    make_llm: MakeLLM, make_adapter: MakeAdapter, make_merged: Callable[..., LLM]
) -> None:
    first, second = make_adapter("first", 1), make_adapter("second", 2, rank=8)
    prompts = [PROMPTS[1]] * 4
    llm = make_llm(lora={"enabled": True, "max_loras": 2})
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[first, None, second, first])
    alone = [tokens(each, prompts=prompts[:1])[0] for each in (make_merged(first), make_llm(), make_merged(second))]
    assert [output.outputs[0].token_ids for output in outputs] == [*alone, alone[0]]
    assert [output.lora_request for output in outputs] == [first, None, second, first]
    assert len({tuple(each) for each in alone}) == 3
