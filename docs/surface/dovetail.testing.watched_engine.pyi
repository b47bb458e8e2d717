from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports, RequestStream
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import Exposition
from dovetail.engine.async_engine import AsyncLLMEngine
from typing import Any

__all__ = [
    "Script",
    "WatchedEngine",
]

@dataclass(frozen=True, kw_only=True)
class Script:
    refusal: Exception | None = None
    num_outputs: int | None = None
    failure: Exception | None = None


class WatchedEngine:
    def __init__(self, engine: AsyncLLMEngine): ...
    script: ...
    is_waiting: ...
    num_open: int
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def is_running(self) -> bool: ...
    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestStream: ...
    async def hold(self, request_id: str) -> None: ...
    async def abort(self, request_id: str) -> None: ...
    async def plan_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
    ) -> RequestPlan: ...
    async def explain_request(self, request_id: str) -> RequestReports: ...
    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str: ...
    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> ChatPrompt: ...
    def token_texts(self, token_ids: Iterable[int]) -> list[str]: ...
    async def metrics(self) -> Exposition: ...
    async def check_health(self) -> None: ...
    async def num_used_blocks(self) -> int: ...
