"""`LLM` with the calls of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, cast

from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import BeamSearchOutput, RequestOutput
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
from dovetail.engine import llm
from dovetail.engine.llm import Message
from dovetail.vllm import missing
from dovetail.vllm.engine.llm_engine import LLMEngine
from dovetail.vllm.sampling_params import SamplingParams as MutableSamplingParams
from dovetail.vllm.v1.metrics.reader import Metric


class LLM(llm.LLM):
    """Dovetail's `LLM` under vLLM's names: `LLM(model, **engine_args)`."""

    engine_class: ClassVar[type[LLMEngine]] = LLMEngine
    engine: LLMEngine

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for the calls of `LLMEngine`."""
        return self.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        **other: Any,
    ) -> list[RequestOutput]:
        """As Dovetail's; `prompt_token_ids` are prompts of token ids."""
        missing.refuse_given("LLM.generate", other)
        if prompt_token_ids is not None:
            if prompts is not None:
                raise RequestError("LLM.generate got prompts and prompt_token_ids: give one of them")
            prompts = cast("Prompt | Sequence[Prompt]", prompt_token_ids)
        if prompts is None:
            raise RequestError("LLM.generate got no prompts")
        return super().generate(
            prompts, sampling_params, use_tqdm=_is_shown(use_tqdm), priority=priority, lora_request=lora_request
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **other: Any,
    ) -> list[RequestOutput]:
        missing.refuse_given("LLM.chat", other)
        if chat_template_content_format != "auto":
            missing.refuse(
                f"chat_template_content_format={chat_template_content_format!r}",
                "the template itself says whether it takes parts or text; leave it out",
            )
        return super().chat(
            messages,
            sampling_params,
            use_tqdm=_is_shown(use_tqdm),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            lora_request=lora_request,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        **other: Any,
    ) -> list[BeamSearchOutput]:
        missing.refuse_given("LLM.beam_search", other)
        return super().beam_search(prompts, params, use_tqdm=_is_shown(use_tqdm), lora_request=lora_request)

    def get_default_sampling_params(self) -> MutableSamplingParams:
        """What the model's generation config recommends, to be changed."""
        return self.engine.default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        return self.engine.get_metrics()

    def set_tokenizer(self, tokenizer: object) -> NoReturn:
        missing.refuse("set_tokenizer", "an engine keeps its tokenizer: LLM(tokenizer='./directory')")

    def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        missing.refuse("collective_rpc", missing.REMOTE_CODE)

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        missing.refuse("apply_model", missing.REMOTE_CODE)

    def start_profile(self) -> NoReturn:
        missing.refuse("start_profile", missing.PROFILER)

    def stop_profile(self) -> NoReturn:
        missing.refuse("stop_profile", missing.PROFILER)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing.missing_member(self, name))


def _is_shown(use_tqdm: object) -> bool:
    if not isinstance(use_tqdm, bool):
        missing.refuse(f"use_tqdm={use_tqdm!r}", "the progress bar is Dovetail's own: True or False")
    return use_tqdm


__getattr__ = missing.answering(__name__)
