from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.server.sampling import SamplingFields
from starlette.requests import Request
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self


@dataclass(frozen=True)
class FormOrigin:
    field: str
    whose: str = ''


@dataclass(frozen=True, kw_only=True)
class Submission:
    response_id: str
    unique: str
    params: SamplingParams
    options: Mapping[str, Any]
    form: FormOrigin


@dataclass(frozen=True, kw_only=True)
class PooledSubmission:
    form: ClassVar[FormOrigin] = FormOrigin('input')
    response_id: str
    unique: str
    params: PoolingParams
    options: Mapping[str, Any]


class SubmittedFields(Protocol):
    request_id: str | None
    priority: int | None
    cache_salt: str | None
    def end_user(self) -> str | None: ...

def submission(
    request: Request,
    fields: SamplingFields,
    params: SamplingParams,
    *,
    prefix: str,
    form: FormOrigin,
    lora_request: LoRARequest | None = None,
) -> Submission: ...
def pooled_submission(
    request: Request,
    fields: SubmittedFields,
    params: PoolingParams,
    *,
    prefix: str,
    lora_request: LoRARequest | None = None,
) -> PooledSubmission: ...
def is_of_response(request_id: str, response_id: str) -> bool: ...

class Streams:
    def __init__(
        self,
        engine: EngineClient,
        prompts: Sequence[Prompt],
        how: Submission | PooledSubmission,
        first_index: int = 0,
    ): ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]: ...
    async def last(self) -> list[RequestOutput]: ...
