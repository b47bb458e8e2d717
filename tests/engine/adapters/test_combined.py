"""Adapters beside everything else that changes how tokens come about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, LoRARequest, SamplingParams
from dovetail.testing.tiny_adapters import save_adapter, save_merged
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.forward import GraphForward

MakeLLM = Callable[..., LLM]
MakeAdapter = Callable[..., LoRARequest]
MakeMerged = Callable[..., LLM]
PROMPTS = [[3 + 7 * i % 120 for i in range(length)] for length in (9, 14, 22)]
REPEATING = [[5, 6, 7, 8] * 5 + [tail] for tail in (5, 6, 9)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ON = {"enabled": True, "max_loras": 2}


def tokens(llm: LLM, lora: Any = None, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora)
    return [output.outputs[0].token_ids for output in outputs]


def mixed(llm: LLM, first: LoRARequest, second: LoRARequest, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Outputs of each prompt with each adapter and without one, in one batch."""
    choices = [first, second, None]
    loras = [choices[index % 3] for index in range(3 * len(prompts))]
    return llm.generate([each for each in prompts for _ in range(3)], GREEDY, use_tqdm=False, lora_request=loras)


def alone(
    make: Callable[..., LLM], base: LLM, adapters: list[LoRARequest], prompts: list[list[int]]
) -> list[list[int]]:
    by_kind = [tokens(make(lora), prompts=prompts) for lora in adapters] + [tokens(base, prompts=prompts)]
    return [found[index] for index in range(len(prompts)) for found in by_kind]


CAPTURED = f"{Path(__file__).parents[2] / 'executors' / 'capturable.py'}:Capturable"
NULL = {"name": "gpu", "device": "null", "null_order": "late"}
SECTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler": {"max_num_batched_tokens": 10, "max_num_seqs": 4}},
    "preemption": {"cache": {"num_blocks": 24}, "model": {"max_model_len": 60}},
    "swapping": {"cache": {"num_blocks": 24, "swap_gib": 0.1}, "model": {"max_model_len": 60}},
    "no replay": {"executor": {"enforce_eager": True}},
    "torch's operators": {"model": {"operators": None}},
    "no prefix cache": {"cache": {"prefix_caching": False}},
    "strict": {"reproducibility": "strict"},
    "steps in flight": {"executor": NULL},
    "steps in flight and preemption": {
        "executor": NULL,
        "cache": {"num_blocks": 24, "swap_gib": 0.1},
        "model": {"max_model_len": 60},
    },
    "graphs": {"executor": NULL | {"cuda_graphs": [2, 4, 8]}, "attention": CAPTURED, "scheduler": {"max_num_seqs": 8}},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_mixed_batches_give_what_merged_weights_do(
    name: str, make_llm: MakeLLM, make_adapter: MakeAdapter, make_merged: MakeMerged
) -> None:
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    llm = make_llm(lora=ON, **SECTIONS[name])
    outputs = mixed(llm, first, second)
    assert [output.outputs[0].token_ids for output in outputs] == alone(
        make_merged, make_llm(), [first, second], PROMPTS
    )
    while llm.engine.has_unfinished_requests():  # the last step in flight
        llm.engine.step()
    if SECTIONS[name].get("cache", {}).get("num_blocks"):
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert (llm.engine.cache_statistics().num_swapped_out_blocks > 0) == (name != "preemption")


def test_steps_with_adapters_have_graphs_of_their_own(
    make_llm: MakeLLM, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    run_pass = GraphForward.run

    def run(self: GraphForward, *args: Any) -> Any:
        states = run_pass(self, *args)
        replays.append(self.num_replays)
        return states

    monkeypatch.setattr(GraphForward, "run", run)
    llm, lora = make_llm(lora=ON, **SECTIONS["graphs"]), make_adapter("pirate")
    for each in (lora, None):
        replays.clear()
        tokens(llm, each)
        assert replays[-1] - replays[0] > len(replays) // 2
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


@pytest.mark.parametrize(
    "drafter",
    [
        {"name": "ngram", "min_match": 1, "num_tokens": 3},
        {"name": "suffix", "num_tokens": 6, "max_spec_factor": 4.0, "tree": True},
        {"name": "self_speculation", "num_tokens": 3, "skip_layers": [1]},
        {"name": "draft_model", "num_tokens": 3},
    ],
    ids=lambda drafter: drafter["name"],
)
def test_drafts_are_verified_by_the_model_with_its_adapter(
    drafter: dict[str, Any], make_llm: MakeLLM, make_adapter: MakeAdapter, make_merged: MakeMerged, tiny_llama: Any
) -> None:
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    own = {"path": str(tiny_llama[0])} if drafter["name"] == "draft_model" else {}
    llm = make_llm(lora=ON, speculative={"drafters": {"it": {"length": "fixed", **drafter, **own}}})
    outputs = mixed(llm, first, second, REPEATING)
    expected = alone(make_merged, make_llm(), [first, second], REPEATING)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.metrics.drafter_error is None for output in outputs)
    assert sum(output.metrics.num_drafted for output in outputs) > 0


def test_self_speculation_guesses_with_the_adapter(make_llm: MakeLLM, tmp_path: Path) -> None:
    """The layer that is left out adds nothing, so every guess is right, if the others have the request's adapter."""
    model = save_tiny_model(tmp_path / "model", tiny_config("llama", max_position_embeddings=512))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    targets = ("layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.up_proj")
    lora = LoRARequest("a", 0, str(save_adapter(tmp_path / "adapter", tmp_path / "model", 1, targets=targets)))
    drafter = {"name": "self_speculation", "num_tokens": 3, "skip_layers": [1], "length": "fixed"}
    llm = make_llm(model={"path": str(tmp_path / "model")}, lora=ON, speculative={"drafters": {"it": drafter}})
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[lora, None, lora])
    assert all(output.metrics.num_accepted == output.metrics.num_drafted > 0 for output in outputs)


@pytest.mark.parametrize("method", ["q4", "q8"])
def test_adapters_are_added_to_quantized_weights(method: str, make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    """The oracle are the same rounded weights under torch's operators, whose last bits differ."""
    lora = make_adapter("pirate")
    found = tokens(make_llm(lora=ON, model={"quantization": method}), lora)
    plain = tokens(make_llm(lora=ON, model={"quantization": method}))
    by_torch = tokens(make_llm(lora=ON, model={"quantization": method, "operators": None}), lora)
    assert [each[:12] for each in found] == [each[:12] for each in by_torch]
    assert found != plain == tokens(make_llm(model={"quantization": method}))


def test_two_ranks_hold_their_shares(make_llm: MakeLLM, make_adapter: MakeAdapter, make_merged: MakeMerged) -> None:
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    llm = make_llm(lora=ON, executor={"tensor_parallel": 2, "threads": 1})
    assert llm.engine.config.executor.name == "multiproc"
    outputs = mixed(llm, first, second)
    assert [output.outputs[0].token_ids for output in outputs] == alone(
        make_merged, make_llm(), [first, second], PROMPTS
    )


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_back_after_sleep(level: int, make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, lora = make_llm(lora=ON, model={"operators": None}), make_adapter("pirate")
    before = tokens(llm, lora)
    llm.sleep(level)
    assert [each.is_in_slot for each in llm.list_loras()] == [False]
    llm.wake_up()
    assert tokens(llm, lora) == before != tokens(llm)


def test_adapters_stay_where_the_kv_memory_is_replaced(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, lora = make_llm(lora=ON), make_adapter("pirate")
    before = tokens(llm, lora)
    llm.engine.initialize_cache(300)
    assert tokens(llm, lora) == before


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "phi3"])
def test_other_families(family: str, make_llm: MakeLLM, tmp_path: Path) -> None:
    """Adapters of attention, which all have; phi3's checkpoint stores queries, keys and values as one layer."""
    directory = tmp_path / "model"
    save_tiny_model(directory, tiny_config(family))
    targets = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj")
    adapter = save_adapter(tmp_path / "adapter", directory, 1, targets=targets)
    merged = save_merged(tmp_path / "merged", directory, adapter)
    model = {"path": str(directory)}
    found = tokens(make_llm(model=model, lora=ON), LoRARequest("a", 0, str(adapter)))
    assert found == tokens(make_llm(model=model | {"path": str(merged)})) != tokens(make_llm(model=model))
