"""Updates of an engine's weights as a rollout worker's trainer asks for them: all four phases in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.async_engine import AsyncLLMEngine
from dovetail.rl.buckets import buckets_of, described


def check_transport(config: ResolvedConfig, name: str, method: str) -> None:
    """Raises `ConfigError` where the config names another `weight_transport` than `method` works by."""
    found = config.weight_transport
    if found is None or found.name.rpartition(":")[2] != name:
        has = "has none" if found is None else f"names {found.name!r}"
        raise ConfigError(f"{method} needs weight_transport: {name}, and the config {has}: set it to {name!r}")


class Refits:
    """Of one engine, which refuses a second update while one is under way."""

    def __init__(self, engine: AsyncLLMEngine):
        self._engine = engine
        self._is_connected = False
        self._prepared: list[Mapping[str, Any]] = []

    def prepare(self, state_dict_info: Mapping[str, Any], bucket_bytes: int) -> None:
        """Takes names, shapes and dtypes of what will be sent. Raises `RequestError`."""
        try:
            tensors = [
                (name, torch.empty(tuple(shape), dtype=dtype, device="meta"))
                for name, (shape, dtype) in state_dict_info.items()
            ]
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"state_dict_info must map names to (shape, torch.dtype): {error}") from error
        self._prepared = [described(bucket) for bucket in buckets_of(tensors, bucket_bytes)]

    @property
    def prepared(self) -> list[Mapping[str, Any]]:
        """A bucket each, as a sender with the same `bucket_bytes` makes them."""
        if not self._prepared:
            raise RequestError("nothing says what will be sent: call prepare_refit_info before, or give update_infos")
        return self._prepared

    def check_transport(self, name: str, method: str) -> None:
        """As the function `check_transport`."""
        check_transport(self._engine.config, name, method)

    async def connect(self, init_info: Mapping[str, Any] | None = None) -> None:
        """`init_weight_transfer_engine`, for the updates from now on."""
        self._is_connected = False
        await self._engine.init_weight_transfer_engine(init_info)
        self._is_connected = True

    async def run(self, update_infos: Iterable[Mapping[str, Any]], weight_version: int | None) -> WeightsReport:
        """One update with a bucket for each of `update_infos`. Connects without an `init_info` where nobody did."""
        if not self._is_connected:
            await self.connect()
        await self._engine.start_weight_update(weight_version=weight_version)
        try:
            for info in update_infos:
                await self._engine.update_weights(info)
            return await self._engine.finish_weight_update()
        except BaseException:
            # The engine ends an update by itself where a phase fails; not so where `update_infos` raises, or the caller
            # is cancelled.
            await self._engine.abort_weight_update()
            raise
