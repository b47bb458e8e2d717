"""`AsyncLLM` with the calls of vLLM's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NoReturn, Self

from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.async_engine import AsyncLLMEngine
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.vllm import missing
from dovetail.vllm.engine.arg_utils import EngineArgs
from dovetail.vllm.engine.llm_engine import LLMEngine, id_text, id_texts


class AsyncLLM(AsyncLLMEngine):
    """Dovetail's `AsyncLLMEngine` under vLLM's names."""

    @classmethod
    def from_config(cls, *args: Any, **keywords: Any) -> Self:
        return cls(LLMEngine.from_config(*args, **keywords))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None, **other: Any) -> Self:
        """An engine from `AsyncEngineArgs`. Raises as `from_config`."""
        missing.refuse_given("AsyncLLM.from_engine_args", other)
        return cls.from_config(**engine_args.keywords())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | int | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
        **other: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As Dovetail's; an id that is a number becomes text."""
        missing.refuse_given("generate", other)
        name = id_text(request_id)
        outputs = super().generate(
            prompt,
            sampling_params,
            name,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            user=user,
            lora_request=lora_request,
        )
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_id: str | int | Iterable[str | int]) -> None:
        """As Dovetail's, of one request or of many; ids that are numbers become text."""
        await super().abort(id_texts(request_id))

    @property
    def is_stopped(self) -> bool:
        """Whether requests are refused."""
        return not self.is_running

    @property
    def dead_error(self) -> BaseException:
        """What ended the engine. Raises `RequestError` for one that goes on."""
        try:
            self._steps.check_running()
        except DovetailError as error:
            return error
        raise RequestError("the engine goes on: nothing has ended it")

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with tokenizer_mode none."""
        return self.tokenizer

    async def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        missing.refuse("collective_rpc", missing.REMOTE_CODE)

    async def start_profile(self) -> NoReturn:
        missing.refuse("start_profile", missing.PROFILER)

    async def stop_profile(self) -> NoReturn:
        missing.refuse("stop_profile", missing.PROFILER)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing.missing_member(self, name))


__getattr__ = missing.answering(__name__)
