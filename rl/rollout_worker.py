"""`AsyncRolloutWorker`: an engine that writes rollouts, with the method names of NeMo RL's asynchronous vLLM worker.

    worker = AsyncRolloutWorker(model="./my-model", rollout=RolloutOptions(max_new_tokens=64), weight_transport="disk")
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
from contextlib import AbstractContextManager, ExitStack, aclosing
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dovetail.config.layers import LayeredConfig
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.async_engine import AsyncLLMEngine
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.resolving.server import resolve_server
from dovetail.rl.collective_sender import BUCKET_BYTES
from dovetail.rl.refits import Refits
from dovetail.rl.rollout_batch import Batch, Result, RolloutOptions, Sample, samples_of, texts_of

HTTP_SERVER = "dovetail.plugins.server.live:configured_server"
"""What serves unless another is named."""
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
        expose_http_server: bool = False,
        http_server: str = HTTP_SERVER,
        options: Iterable[str] = (),
        **keywords: Any,
    ):
        """`config`, `options` and `keywords`: as `LLMEngine.from_config`, whose errors it raises.

        `expose_http_server`: the section `server` of the config is served by a thread of this process, over the same
        engine; at a free port where the section names none. `http_server`: "module:function" of what serves, called
        as `configured_server(engine, server, port=port)`, a context manager whose value has a `url`.
        """
        layered = load_config(config, keywords=keywords, overrides=options)
        self.rollout = rollout
        self.engine = AsyncLLMEngine.from_config(layered)
        self._refits = Refits(self.engine)
        self._serving = ExitStack()
        self._url: str | None = None
        if expose_http_server:
            try:
                self._url = self._serving.enter_context(_served(self.engine, layered, http_server)).url
            except BaseException:
                self.engine.shutdown()
                raise

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

    async def init_collective(
        self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int = 1
    ) -> None:
        """Joins the trainer's group (`CollectiveSender`) by weight_transport `collective`; returns once all are there.

        Arguments are NeMo RL's: `rank_prefix`, the workers of engines before this one; `world_size`, all workers and
        the trainer. Raises `ConfigError` for another transport, `RequestError` for another `train_world_size` than 1.
        """
        self._refits.check_transport("collective", "init_collective")
        if train_world_size != 1:
            raise RequestError(f"train_world_size is {train_world_size}: one rank of the trainer sends, so give 1")
        group = {"master_address": ip, "master_port": port, "world_size": world_size}
        await self._refits.connect({**group, "rank_offset": train_world_size + rank_prefix})

    async def prepare_refit_info(self, state_dict_info: Mapping[str, Any], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """What `update_weights_from_collective` will bring: by name a shape and a torch.dtype, in the order in which
        they are sent. `bucket_bytes`: the sender's."""
        self._refits.prepare(state_dict_info, bucket_bytes)

    async def update_weights_from_collective(
        self, update_infos: Iterable[Mapping[str, Any]] | None = None, weight_version: int | None = None
    ) -> bool:
        """`update_weights` by weight_transport `collective`. `update_infos`: what `CollectiveSender.send` yields; None:
        what `prepare_refit_info` said. Raises `ConfigError` for another transport."""
        self._refits.check_transport("collective", "update_weights_from_collective")
        infos = self._refits.prepared if update_infos is None else update_infos
        return await self.update_weights(infos, weight_version)

    async def update_weights_via_ipc_zmq(
        self,
        update_infos: Iterable[Mapping[str, Any]],
        init_info: Mapping[str, Any] | None = None,
        weight_version: int | None = None,
    ) -> bool:
        """`update_weights` by weight_transport `ipc`. `update_infos`: what `WeightSender.send` yields; `init_info`:
        what its `init_info` gives, for the first update from this sender. Raises `ConfigError` for another
        transport."""
        self._refits.check_transport("ipc", "update_weights_via_ipc_zmq")
        if init_info is not None:
            await self._refits.connect(init_info)
        return await self.update_weights(update_infos, weight_version)

    async def report_dp_openai_server_base_url(self) -> str | None:
        """As "http://HOST:PORT/v1"; None without `expose_http_server`."""
        return None if self._url is None else f"{self._url}/v1"

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
        """Ends server and engine. Idempotent."""
        await asyncio.to_thread(self._serving.close)
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


def _served(engine: AsyncLLMEngine, layered: LayeredConfig, reference: str) -> AbstractContextManager[Any]:
    section = layered.config.server
    port = section.port if section is not None and "port" in section.model_fields_set else 0
    module, _, name = reference.partition(":")
    serve = vars(import_module(module)).get(name)
    if serve is None:
        raise ConfigError(f'http_server is {reference!r}, which is no function: give "package.module:function"')
    serving: AbstractContextManager[Any] = serve(engine, resolve_server(layered), port=port)
    return serving


def _device_id(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
