"""`AsyncRolloutWorker` over a tiny model: samples as they end, log probabilities, new weights, sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.pausing import EngineConflict
from dovetail.rl import AsyncRolloutWorker, RolloutOptions
from dovetail.rl.collective_sender import CollectiveSender
from dovetail.rl.weight_sender import WeightSender
from dovetail.testing.chat_models import FAMILIES, save_chat_model
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[5, 6, 7], list(range(20, 45)), [9]]
PAD = 127
MAX_LENGTH = 48
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By name (folder, transformers model in float32) of two models of one shape."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {"old": root / "old", "new": root / "new"}
    return {
        name: (folder, save_tiny_model(folder, tiny_config("llama"), seed=seed))
        for seed, (name, folder) in enumerate(folders.items(), 1)
    }


def sections(folder: Path) -> dict[str, Any]:
    model = {"path": str(folder), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": MAX_LENGTH}
    return {"model": model, "cache": {"num_blocks": 60}, "executor": {"threads": 1}}


@pytest.fixture(scope="module")
def worker(checkpoints: Mapping[str, tuple[Path, Any]]) -> Iterator[AsyncRolloutWorker]:
    rollout = RolloutOptions(max_new_tokens=NUM_TOKENS, pad_token_id=PAD)
    made = AsyncRolloutWorker(rollout=rollout, weight_transport="disk", **sections(checkpoints["old"][0]))
    yield made
    assert asyncio.run(made.shutdown())


def batch_of(prompts: list[list[int]], width: int = 0) -> dict[str, Any]:
    width = max(width, *map(len, prompts))
    ids = torch.tensor([prompt + [PAD] * (width - len(prompt)) for prompt in prompts])
    return {"input_ids": ids, "input_lengths": torch.tensor([len(prompt) for prompt in prompts])}


async def samples(worker: AsyncRolloutWorker, data: Mapping[str, Any], greedy: bool = False) -> list[tuple[int, Any]]:
    return [ready async for ready in worker.generate_async(data, greedy)]


def rollouts(worker: AsyncRolloutWorker, data: Mapping[str, Any], greedy: bool = False) -> list[tuple[int, Any]]:
    return asyncio.run(samples(worker, data, greedy))


def greedy_ids(worker: AsyncRolloutWorker) -> list[list[int]]:
    return [result["output_ids"][0].tolist() for _, result in sorted(rollouts(worker, batch_of(PROMPTS), greedy=True))]


def test_a_sample_has_its_prompt_its_completion_and_their_log_probabilities(
    worker: AsyncRolloutWorker, checkpoints: Mapping[str, tuple[Path, Any]]
) -> None:
    model = checkpoints["old"][1]
    found = dict(rollouts(worker, batch_of(PROMPTS)))
    assert sorted(found) == [0, 1, 2]
    for index, prompt in enumerate(PROMPTS):
        result, start = found[index], len(prompt)
        ids = result["output_ids"]
        assert ids[0, :start].tolist() == prompt
        assert ids.shape == result["logprobs"].shape == (1, start + NUM_TOKENS)
        assert (result["generation_lengths"].item(), result["truncated"].item()) == (NUM_TOKENS, True)
        assert result["unpadded_sequence_lengths"].item() == start + NUM_TOKENS
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits.float(), -1)
        expected = scores[0, start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]
        assert not result["logprobs"][0, :start].any()
        torch.testing.assert_close(result["logprobs"][0, start:], expected, atol=1e-4, rtol=0)


def test_samples_come_in_the_order_in_which_they_end(worker: AsyncRolloutWorker) -> None:
    # The model's length ends the first of them after 8 tokens, the second after 16 and the third after 3.
    prompts = [[1 + i for i in range(length)] for length in (MAX_LENGTH - 8, 4, MAX_LENGTH - 3)]

    async def held_until_all_are_read() -> list[tuple[int, Any]]:
        # Otherwise a sample may be done before another is there, or all of them before one is read.
        await worker.engine.pause("keep")
        try:
            found = asyncio.create_task(samples(worker, batch_of(prompts)))
            while len(worker.engine._engine.request_ids) < 3:
                await asyncio.sleep(0)
            await worker.engine.cache_statistics()  # answered after all three were added
        finally:
            await worker.engine.resume()
        return await found

    found = asyncio.run(held_until_all_are_read())
    assert [index for index, _ in found] == [2, 0, 1]
    assert [result["generation_lengths"].item() for _, result in found] == [3, 8, 16]


def test_a_prompt_as_long_as_the_model_comes_back_as_it_is(worker: AsyncRolloutWorker) -> None:
    ((_, result),) = rollouts(worker, batch_of([[3] * MAX_LENGTH]))
    assert result["output_ids"].tolist() == [[3] * MAX_LENGTH]
    assert (result["generation_lengths"].item(), result["truncated"].item()) == (0, True)


def test_an_empty_batch_has_no_results(worker: AsyncRolloutWorker) -> None:
    empty = {"input_ids": torch.zeros(0, 4, dtype=torch.long), "input_lengths": torch.zeros(0, dtype=torch.long)}
    assert rollouts(worker, empty) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor"),
        ({"input_ids": torch.ones(3, 25)}, "input_ids must be integers"),
        ({"input_lengths": torch.tensor([3, 25])}, "3 rows and input_lengths 2"),
        ({"input_lengths": torch.tensor([3, 25, 0])}, r"input_lengths\[2\] is 0"),
        ({"input_ids": torch.tensor([[PAD] * (25 - len(row)) + row for row in PROMPTS])}, "padded on the right"),
        ({"stop_strings": [None]}, "stop_strings must be a list"),
    ],
)
def test_what_is_no_batch_is_refused_by_its_key(
    worker: AsyncRolloutWorker, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        rollouts(worker, batch_of(PROMPTS) | changes)


def test_the_error_of_a_sample_ends_the_others(worker: AsyncRolloutWorker) -> None:
    bad = batch_of([[1, 2, 3], [4, 500, 6]])
    with pytest.raises(RequestError, match="500") as raised:
        rollouts(worker, bad)
    assert raised.value.__notes__ == ["of sample 1 of the batch"]
    assert asyncio.run(worker.engine.cache_statistics()).num_used_blocks == 0


def test_a_generator_that_is_closed_ends_its_samples(worker: AsyncRolloutWorker) -> None:
    async def first_only() -> int:
        samples = worker.generate_async(batch_of(PROMPTS))
        await anext(samples)
        await samples.aclose()
        return (await worker.engine.cache_statistics()).num_used_blocks

    assert asyncio.run(first_only()) == 0


def test_new_weights_write_what_a_fresh_engine_would(
    worker: AsyncRolloutWorker, checkpoints: Mapping[str, tuple[Path, Any]]
) -> None:
    before = greedy_ids(worker)
    with pytest.raises(ModelError, match="nowhere"):
        asyncio.run(worker.update_weights([{"path": "nowhere"}]))
    assert greedy_ids(worker) == before
    new, old = checkpoints["new"][0], checkpoints["old"][0]
    assert asyncio.run(worker.update_weights([{"path": new}]))
    ((_, result),) = rollouts(worker, batch_of(PROMPTS[:1]), greedy=True)
    assert result["weight_version"].item() == 1
    after = greedy_ids(worker)
    with LLM(**sections(new)) as fresh:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        outputs = fresh.generate(PROMPTS, params, use_tqdm=False)
    assert after == [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    assert after != before
    assert asyncio.run(worker.update_weights([{"path": old}], weight_version=5))
    assert greedy_ids(worker) == before


def test_a_worker_sleeps_and_wakes_up(worker: AsyncRolloutWorker) -> None:
    before = greedy_ids(worker)

    async def sleep_and_wake() -> None:
        await worker.sleep_async()
        with pytest.raises(EngineConflict):
            await worker.sleep_async()
        await worker.wake_up_async()
        assert await worker.reset_prefix_cache_async()

    asyncio.run(sleep_and_wake())
    assert greedy_ids(worker) == before


def test_workers_report_their_devices(worker: AsyncRolloutWorker) -> None:
    assert asyncio.run(worker.report_device_id()) == ["cpu"]


CHAT: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "cache": {"num_blocks": 60}}


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    save_chat_model(tmp_path, FAMILIES["hermes"])
    return tmp_path


def test_texts_are_completed_as_generate_does(chat_folder: Path) -> None:
    prompts = ["Once upon a time", "Hi"]
    worker = AsyncRolloutWorker(model=str(chat_folder), rollout=RolloutOptions(max_new_tokens=8), **CHAT)

    async def ask() -> list[tuple[int, Any]]:
        return [ready async for ready in worker.generate_text_async({"prompts": prompts}, greedy=True)]

    try:
        ready = sorted(asyncio.run(ask()))
    finally:
        asyncio.run(worker.shutdown())
    with LLM(str(chat_folder), **CHAT) as llm:
        expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert ready == [(i, {"texts": [output.outputs[0].text]}) for i, output in enumerate(expected)]
    assert any(output.outputs[0].text for output in expected)


def test_a_server_over_the_same_engine_keeps_prefix_ids(chat_folder: Path) -> None:
    worker = AsyncRolloutWorker(
        model=str(chat_folder),
        rollout=RolloutOptions(max_new_tokens=4),
        weight_transport="in_process",
        expose_http_server=True,
        **CHAT,
    )
    weights = dict(load_file(chat_folder / "model.safetensors"))
    try:
        url = asyncio.run(worker.report_dp_openai_server_base_url())

        def ask(body: dict[str, Any]) -> Any:
            return httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()

        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        first = ask(body | {"required_prefix_token_ids": []})
        prefix = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        ids = torch.tensor([first["prompt_token_ids"]])
        data = {"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])}
        ((_, sample),) = rollouts(worker, data, greedy=True)
        assert sample["output_ids"][0].tolist() == prefix
        assert asyncio.run(worker.update_weights([{"weights": weights}]))
        body["messages"] += [{"role": "assistant", "content": "other text"}, {"role": "user", "content": "Go on"}]
        second = ask(body | {"required_prefix_token_ids": prefix})
        assert second["prefix_verdict"]["outcome"] == "rewritten"
    finally:
        asyncio.run(worker.shutdown())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")


def test_weights_come_by_collective(checkpoints: Mapping[str, tuple[Path, Any]]) -> None:
    weights = load_file(checkpoints["new"][0] / "model.safetensors")
    rollout = RolloutOptions(max_new_tokens=NUM_TOKENS, pad_token_id=PAD)
    worker = AsyncRolloutWorker(rollout=rollout, weight_transport="collective", **sections(checkpoints["old"][0]))
    sender = CollectiveSender("127.0.0.1", world_size=2)

    async def update() -> None:
        port = sender.init_info()["master_port"]
        await asyncio.gather(
            asyncio.to_thread(sender.connect), worker.init_collective(0, "127.0.0.1", port, 2, train_world_size=1)
        )
        infos = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        await worker.prepare_refit_info(infos, bucket_bytes=40_000)
        sending = asyncio.to_thread(lambda: len(list(sender.send(weights.items(), bucket_bytes=40_000))))
        num_sent, is_updated = await asyncio.gather(sending, worker.update_weights_from_collective())
        assert (num_sent > 1, is_updated) == (True, True)

    try:
        asyncio.run(update())
        after = greedy_ids(worker)
        with pytest.raises(ConfigError, match="weight_transport: ipc"):
            asyncio.run(worker.update_weights_via_ipc_zmq([]))
    finally:
        asyncio.run(worker.shutdown())
    with LLM(**sections(checkpoints["new"][0])) as fresh:
        outputs = fresh.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    assert after == [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def test_weights_come_by_ipc(checkpoints: Mapping[str, tuple[Path, Any]]) -> None:
    weights = load_file(checkpoints["old"][0] / "model.safetensors")
    rollout = RolloutOptions(max_new_tokens=NUM_TOKENS, pad_token_id=PAD)
    worker = AsyncRolloutWorker(rollout=rollout, weight_transport="ipc", **sections(checkpoints["new"][0]))
    try:
        with WeightSender() as sender:
            updating = worker.update_weights_via_ipc_zmq(sender.send(weights.items()), sender.init_info())
            assert asyncio.run(updating)
        ((_, result),) = rollouts(worker, batch_of(PROMPTS[:1]), greedy=True)
    finally:
        asyncio.run(worker.shutdown())
    with torch.no_grad():
        logits = checkpoints["old"][1](result["output_ids"]).logits
    assert logits[0, 2:-1].argmax(-1).tolist() == result["output_ids"][0, 3:].tolist()
