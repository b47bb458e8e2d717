"""`dovetail.vllm.LLM` and its engines, called as programs written for vLLM call them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.telemetry import StepStats, TelemetrySink
from dovetail.engine.pooling.outputs import EmbeddingRequestOutput
from dovetail.testing.tiny_adapters import save_adapter
from dovetail.vllm import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from dovetail.vllm.lora.request import LoRARequest
from dovetail.vllm.pooling_params import PoolingParams
from dovetail.vllm.v1.metrics.reader import Counter, Histogram

GREEDY = SamplingParams(temperature=0, max_tokens=5)


def test_answers_are_those_of_dovetail(llm: LLM, checkpoint: Path) -> None:
    [theirs] = llm.generate("Hello", GREEDY, False)
    with dovetail.LLM(str(checkpoint), dtype="float32", cache={"num_blocks": 100}) as ours:
        [expected] = ours.generate("Hello", dovetail.SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert theirs.outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_adapter_is_given_as_vllm_takes_it(llm: LLM, checkpoint: Path, tmp_path: Path) -> None:
    lora = LoRARequest("pirate", 1, str(save_adapter(tmp_path / "pirate", checkpoint, seed=1)))
    [plain] = llm.generate("Hello", GREEDY, False)
    with LLM(
        str(checkpoint), dtype="float32", num_gpu_blocks_override=100, enable_lora=True, max_loras=1, max_lora_rank=8
    ) as adapting:
        [adapted] = adapting.generate("Hello", GREEDY, False, lora)
        assert (adapted.lora_request, adapted.lora_request.lora_int_id) == (lora, 1)
        assert adapting.generate("Hello", GREEDY, False)[0].outputs[0].token_ids == plain.outputs[0].token_ids
        adapting.llm_engine.remove_lora(1)
    assert adapted.outputs[0].token_ids != plain.outputs[0].token_ids


def test_default_parameters_can_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    params.ignore_eos = True
    assert len(llm.generate(["a"], params, False)[0].outputs[0].token_ids) == 3


def test_what_a_request_was_added_with_does_not_change_under_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.llm_engine.add_request(7, "a", params)
    params.max_tokens = 1
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        assert llm.llm_engine.get_num_unfinished_requests() == 1
        outputs += llm.llm_engine.step()
    assert outputs[-1].request_id == "7"
    assert len(outputs[-1].outputs[0].token_ids) == 4


def test_numbers_abort_what_numbers_named(llm: LLM) -> None:
    engine = llm.llm_engine
    for number in range(3):
        engine.add_request(number, "a", GREEDY, None, None, None, None, 0)
    assert [output.request_id for output in engine.abort_request(0)] == ["0"]
    assert [output.request_id for output in engine.abort_request([1, "2"])] == ["1", "2"]


def test_a_bad_value_is_refused_when_it_is_used(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    params.top_p = 7
    with pytest.raises(RequestError, match=r"top_p must be in \(0, 1\], got 7"):
        llm.generate("a", params, False)


def test_prompts_may_be_token_ids_beside_no_prompts(llm: LLM) -> None:
    ids = [5, 6, 7]
    [one] = llm.generate(None, GREEDY, prompt_token_ids=ids, lora_request=None, use_tqdm=False)
    [two] = llm.generate([ids], GREEDY, False)
    assert one.prompt_token_ids == two.prompt_token_ids == ids
    assert int(two.request_id) == int(one.request_id) + 1


def test_chat_takes_its_arguments_by_position(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "hi"}], GREEDY, False, None, None, "auto", False)
    assert output.prompt == "user: hi\n"


def test_metrics_count_what_ran(llm: LLM) -> None:
    def read() -> tuple[int, int]:
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        tokens, latency = metrics["vllm:generation_tokens"], metrics["vllm:e2e_request_latency_seconds"]
        assert isinstance(tokens, Counter)
        assert isinstance(latency, Histogram)
        assert latency.buckets["+Inf"] == latency.count
        return tokens.value, latency.count

    before = read()
    llm.generate(["abc", "d"], SamplingParams(max_tokens=6, ignore_eos=True), False)
    after = read()
    assert (after[0] - before[0], after[1] - before[1]) == (12, 2)


def test_sleeping(llm: LLM) -> None:
    llm.sleep()
    assert llm.llm_engine.is_sleeping()
    llm.wake_up(tags=["weights"])
    assert llm.llm_engine.is_sleeping()
    llm.wake_up(tags=["kv_cache"])
    assert not llm.llm_engine.is_sleeping()


def test_pooling_has_the_names_of_vllm(llm: LLM) -> None:
    (embedding,) = llm.embed(["a"], use_tqdm=False)
    (pooled,) = llm.encode("a", PoolingParams(normalize=False), use_tqdm=False)
    (score,) = llm.score("a", "a", use_tqdm=False)
    assert isinstance(embedding, EmbeddingRequestOutput)
    assert pooled.outputs.data.shape == (embedding.outputs.hidden_size,)
    assert score.outputs.score == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda llm: llm.collective_rpc("f"), "is a plugin"),
        (lambda llm: llm.apply_model(print), "is a plugin"),
        (lambda llm: llm.start_profile(), "torch.profiler"),
        (lambda llm: llm.stop_profile(), "torch.profiler"),
        (lambda llm: llm.set_tokenizer(None), "LLM\\(tokenizer="),
        (lambda llm: llm.generate("a", lora_request=1), "must be a LoRARequest"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], mm_processor_kwargs={}), "text only"),
        (lambda llm: llm.generate("a", use_tqdm=print), "True or False"),
        (lambda llm: llm.generate(), "no prompts"),
        (
            lambda llm: llm.llm_engine.add_request("0", "a", GREEDY, lora_request=LoRARequest("a", 1, "/a")),
            "enable_lora",
        ),
        (lambda llm: llm.llm_engine.collective_rpc("f"), "is a plugin"),
        (lambda llm: llm.llm_engine.start_profile(), "torch.profiler"),
    ],
)
def test_what_is_not_served_says_why(llm: LLM, call: Callable[[LLM], object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        call(llm)


def test_members_that_are_missing_say_why(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"vllm_config is not in Dovetail: .*`config`"):
        _ = llm.llm_engine.vllm_config
    with pytest.raises(TypeError, match=r"LLM.generate has no argument 'promps'"):
        llm.generate("a", promps=1)


class HoldsAll(TelemetrySink):
    """Holds every request of an engine after each step."""

    contract = (1, 0)

    def __init__(self, engine: Any):
        self.engine = engine

    def on_step(self, stats: StepStats) -> None:
        self.engine.hold(self.engine.request_ids)


def test_requests_are_aborted_by_the_number_that_was_given(checkpoint: Path) -> None:
    args = AsyncEngineArgs(model=str(checkpoint), num_gpu_blocks_override=70)

    async def stop() -> list[str | None]:
        with AsyncLLM.from_engine_args(args) as engine:
            # Held after its first token: nothing but the abort ends it.
            engine._engine.add_telemetry_sink(HoldsAll(engine._engine))
            params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
            reasons = []
            async for output in engine.generate("ab", params, 7):
                reasons.append(output.outputs[0].finish_reason)
                await engine.abort([7])
            return reasons

    assert asyncio.run(stop())[-1] == "abort"


def test_metrics_that_nobody_counted_say_so(checkpoint: Path) -> None:
    args = EngineArgs(str(checkpoint), num_gpu_blocks_override=70)
    with LLMEngine.from_engine_args(args) as engine, pytest.raises(RequestError, match="disable_log_stats=False"):
        engine.get_metrics()


def test_streaming(checkpoint: Path) -> None:
    args = AsyncEngineArgs(model=str(checkpoint), num_gpu_blocks_override=70, enforce_eager=True)

    async def stream() -> tuple[list[int], list[int]]:
        with AsyncLLM.from_engine_args(args) as engine:
            await engine.check_health()
            assert not engine.errored
            assert not await engine.is_sleeping()
            params = SamplingParams(max_tokens=6, temperature=0, output_kind=RequestOutputKind.DELTA)
            deltas: list[int] = []
            async for output in engine.generate(request_id=3, prompt="ab", sampling_params=params):
                assert output.request_id == "3"
                deltas += output.outputs[0].token_ids
            params.output_kind = RequestOutputKind.FINAL_ONLY
            [whole] = [output async for output in engine.generate("ab", params, "4")]
        with pytest.raises(DovetailError, match="shut down"):
            await engine.check_health()
        assert engine.is_stopped
        assert not engine.errored
        return deltas, whole.outputs[0].token_ids

    deltas, whole = asyncio.run(stream())
    assert deltas == whole


def test_calls_have_the_order_of_arguments_that_vllm_has() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(LLM.generate)[1:5] == ["prompts", "sampling_params", "use_tqdm", "lora_request"]
    assert names(LLM.chat)[1:5] == ["messages", "sampling_params", "use_tqdm", "lora_request"]
    assert names(LLM.beam_search)[1:5] == ["prompts", "params", "lora_request", "use_tqdm"]
    assert names(LLMEngine.add_request)[1:5] == ["request_id", "prompt", "params", "arrival_time"]
    assert names(AsyncLLM.generate)[1:4] == ["prompt", "sampling_params", "request_id"]
