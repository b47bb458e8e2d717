from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.config.layers import LayeredConfig
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.rl.rollout_batch import Batch
from dovetail.rl.rollout_worker import Ready
from pathlib import Path
from typing import Any

__all__ = [
    "AsyncRolloutWorker",
    "RolloutOptions",
]

class AsyncRolloutWorker:
    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        rollout: RolloutOptions,
        expose_http_server: bool = False,
        http_server: str = 'dovetail.plugins.server.live:configured_server',
        options: Iterable[str] = (),
        **keywords: Any,
    ): ...
    rollout: RolloutOptions
    engine: ...
    async def generate_async(self, data: Batch, greedy: bool = False) -> AsyncGenerator[Ready]: ...
    async def generate_text_async(self, data: Batch, greedy: bool = False) -> AsyncGenerator[Ready]: ...
    async def update_weights(
        self,
        update_infos: Iterable[Mapping[str, Any]],
        weight_version: int | None = None,
    ) -> bool: ...
    async def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int = 1,
    ) -> None: ...
    async def prepare_refit_info(
        self,
        state_dict_info: Mapping[str, Any],
        *,
        bucket_bytes: int = 256 << 20,
    ) -> None: ...
    async def update_weights_from_collective(
        self,
        update_infos: Iterable[Mapping[str, Any]] | None = None,
        weight_version: int | None = None,
    ) -> bool: ...
    async def update_weights_via_ipc_zmq(
        self,
        update_infos: Iterable[Mapping[str, Any]],
        init_info: Mapping[str, Any] | None = None,
        weight_version: int | None = None,
    ) -> bool: ...
    async def report_dp_openai_server_base_url(self) -> str | None: ...
    async def report_device_id(self) -> list[str]: ...
    async def reset_prefix_cache_async(self) -> PrefixCacheReset: ...
    async def sleep_async(self, level: int = 1, tags: Collection[str] | None = None) -> int: ...
    async def wake_up_async(
        self,
        tags: Collection[str] | None = None,
        *,
        new_weights: bool = False,
        for_update: bool = False,
    ) -> None: ...
    async def shutdown(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    pad_token_id: int = 0
    logprobs_mode: str | None = None
    def sampling_params(
        self,
        max_tokens: int,
        stop: Sequence[str],
        greedy: bool,
        with_text: bool = False,
    ) -> SamplingParams: ...
