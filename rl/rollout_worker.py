"""`AsyncRolloutWorker`: an engine that writes rollouts, with the method names of NeMo RL's asynchronous vLLM worker.

    worker = AsyncRolloutWorker("engine.yaml", rollout=RolloutOptions(max_new_tokens=64), weight_transport="disk")
    async for index, result in worker.generate_async({"input_ids": ids, "input_lengths": lengths}):
        ...  # samples in the order in which they end
    await worker.update_weights([{"path": "./step-1"}])
    await worker.shutdown()

Batches are plain dicts of tensors (`rollout_batch`). NeMo RL itself is not needed, and no process is started for the
worker: whoever runs it chooses (a Ray actor, say).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from dovetail.config.layers import LayeredConfig
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.async_engine import AsyncLLMEngine
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.rl.refits import Refits
from dovetail.rl.rollout_batch import Batch, Result, RolloutOptions, Sample, samples_of, texts_of

Ready = tuple[int, Result]
"""Index of a sample in its batch, and what it became."""


class AsyncRolloutWorker:
    """An engine for rollouts.

    Its coroutines may be called from any event loop, any number of them at once. Errors are raised, never returned:
    `RequestError` for a batch or a call that is refused, what the engine raises otherwise. Methods that NeMo RL's
    trainer asks for success return True.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        rollout: RolloutOptions,
        options: Iterable[str] = (),
        **keywords: Any,
    ):
        """`config`, `options` and `keywords`: as `LLMEngine.from_config`, whose errors it raises."""
        self.rollout = rollout
        self.engine = AsyncLLMEngine.from_config(config, options=options, **keywords)
        self._refits = Refits(self.engine)

    async def generate_async(self, data: Batch, greedy: bool = False) -> AsyncGenerator[Ready]:
        """Yields the samples of a batch as they end, each with its index. Keys, shapes and dtypes: `rollout_batch`.

        A prompt that leaves the model's length no token for a completion comes back as it is, with `truncated` set.
        Closing the generator ends the samples that are left, and so does an error in one of them. `greedy`: temperature
        0. Raises `RequestError`.
        """
        samples = samples_of(data, self.rollout.pad_token_id)
        async with aclosing(_as_ready([self._sample(sample, greedy) for sample in samples])) as ready:
            async for one in ready:
                yield one

    async def generate_text_async(self, data: Batch, greedy: bool = False) -> AsyncGenerator[Ready]:
        """Yields {"texts": [completion]} of each of the `prompts`, texts, as it ends. Otherwise as `generate_async`."""
        prompts = texts_of(data)
        async with aclosing(_as_ready([self._text(*prompt, greedy) for prompt in prompts])) as ready:
            async for one in ready:
                yield one

    async def update_weights(
        self, update_infos: Iterable[Mapping[str, Any]], weight_version: int | None = None
    ) -> bool:
        """One update of all weights, by the config's `weight_transport`: a bucket for each of `update_infos`, which
        are what that transport takes. `weight_version`: see `WeightUpdates.start_weight_update`, whose errors it
        raises, with those of `update_weights` and `finish_weight_update`."""
        await self._refits.run(update_infos, weight_version)
        return True

    async def report_device_id(self) -> list[str]:
        """Of each worker, in rank order: the UUID of its GPU as NVIDIA's tools show it, or torch's name of a device
        that has none."""
        return [_device_id(device) for device in self.engine.devices]

    async def reset_prefix_cache_async(self) -> PrefixCacheReset:
        """Forgets cached prefixes. An update of weights needs none: KV of other weights is never found."""
        return await self.engine.reset_prefix_cache()

    async def sleep_async(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """Gives memory back; returns the bytes. See `AsyncLLMEngine.sleep`."""
        return await self.engine.sleep(level, tags)

    async def wake_up_async(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """Takes memory again. See `AsyncLLMEngine.wake_up`."""
        await self.engine.wake_up(tags, new_weights=new_weights, for_update=for_update)

    async def shutdown(self) -> bool:
        """Ends the engine. Idempotent."""
        await asyncio.to_thread(self.engine.shutdown)
        return True

    async def _sample(self, sample: Sample, greedy: bool) -> Result:
        left = self.engine.facts.max_model_len - len(sample.row)
        if left < 1:
            return sample.result(None, (await self.engine.weights()).version)
        max_tokens = min(self.rollout.max_new_tokens, left)
        params = self.rollout.sampling_params(max_tokens, sample.stop_strings, greedy)
        output = await self._last(sample.token_ids, params)
        return sample.result(output.outputs[0], output.weight_version)

    async def _text(self, prompt: str, stop: Sequence[str], greedy: bool) -> Result:
        params = self.rollout.sampling_params(self.rollout.max_new_tokens, stop, greedy, with_text=True)
        output = await self._last(prompt, params)
        return {"texts": [output.outputs[0].text]}

    async def _last(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        stream = await self.engine.submit(prompt, params)
        try:
            return [output async for output in stream][-1]
        finally:
            stream.close()


async def _as_ready(samples: Sequence[Coroutine[Any, Any, Result]]) -> AsyncGenerator[Ready]:
    """Results as they come, with the index of each. Ends those that are left when it is closed, or one fails."""
    tasks = [asyncio.create_task(_numbered(index, sample)) for index, sample in enumerate(samples)]
    try:
        for ready in asyncio.as_completed(tasks):
            yield await ready
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _numbered(index: int, sample: Coroutine[Any, Any, Result]) -> Ready:
    try:
        return index, await sample
    except Exception as error:
        error.add_note(f"of sample {index} of the batch")
        raise


def _device_id(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
