import torch
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.config.layers import LayeredConfig
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.engine import LLMEngine
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.step_loop import ScheduledStep
from dovetail.rl.prompt_dataset import PromptDataset
from dovetail.rl.rollout_batch import Batch, Result
from dovetail.rl.rollout_worker import Ready
from pathlib import Path
from typing import Any

__all__ = [
    "AsyncRolloutWorker",
    "ModuleOptions",
    "RolloutModule",
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
class ModuleOptions:
    seq_length: int
    max_new_tokens: int
    new_token_limit: bool = True
    num_inference_per_prompt: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    eval_temperature: float = 1.0
    eval_top_p: float = 1.0
    eval_top_k: int = -1
    eval_min_p: float = 0.0
    eval_presence_penalty: float = 0.0
    eval_frequency_penalty: float = 0.0
    eval_repetition_penalty: float = 1.0
    stop_token_list: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    pad_token_id: int = 0
    logprobs_mode: str | None = None
    prompt_key: str = 'prompt'
    input_ids_key: str = 'input_ids'
    @property
    def max_prompt_length(self) -> int: ...
    def max_tokens(self, prompt_length: int) -> int: ...
    def sampling_params(self, max_tokens: int, *, is_eval: bool, with_text: bool) -> SamplingParams: ...


class RolloutModule:
    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        model_args: ModuleOptions,
        options: Iterable[str] = (),
        **keywords: Any,
    ): ...
    model_args: ModuleOptions
    def setup(self) -> None: ...
    def model_provider(self) -> LLMEngine: ...
    @property
    def engine(self) -> LLMEngine: ...
    def build_dataset(self, prompts: Sequence[Any], is_eval: bool = False) -> PromptDataset: ...
    def forward_step(self, data: Batch, iteration: int = 0) -> Result: ...
    def eval_forward(self, data: Batch, iteration: int = 0) -> Result: ...
    def decode_internal(self, batched_outputs: Sequence[RequestOutput]) -> Result: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def outputs(self) -> list[RequestOutput]: ...
    def schedule(self) -> ScheduledStep | None: ...
    def execute_step(self, scheduled: ScheduledStep | None) -> int: ...
    def abort_requests(self) -> None: ...
    def pre_parameter_sync(self, weight_version: int | None = None) -> int: ...
    def parameter_sync(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def post_parameter_sync(self) -> WeightsReport: ...
    def shutdown(self) -> None: ...


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
