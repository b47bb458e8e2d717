"""`LLM`: a model in this process, prompts in, finished outputs out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from dovetail.config.layers import LayeredConfig
from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import BeamSearchOutput, RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.beam import BeamSearch
from dovetail.engine.engine import LLMEngine
from dovetail.engine.failure import check_outputs
from dovetail.engine.input_processor import as_prompts
from dovetail.engine.joint_run import JointCall, JointRun
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from dovetail.engine.pooling.params import as_task, check_sampling
from dovetail.engine.pooling.scores import cosines, for_each, pair_prompt, pair_scores
from dovetail.engine.progress import GenerationProgress
from dovetail.engine.tokenization.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One chat message: "role" and "content", as chat templates take them."""


class LLM:
    """A model and an engine, for offline use. Several threads may use one: their requests are batched together, and
    what needs the engine for itself waits for its turn.

    `LLM("engine.yaml")`-style configs go in `config`; `model` and every other section of the file is also a
    keyword, as are the names that vLLM users know::

        LLM(config="engine.yaml")
        LLM(model="./my-model", attention="sdpa", scheduler={"name": "priority"})
        LLM(model="hf:org/name", dtype="bfloat16", max_model_len=4096, tensor_parallel_size=2)

    Raises `ConfigError`, `PluginError`, `ModelError` or `CapacityError`.
    """

    engine_class: ClassVar[type[LLMEngine]] = LLMEngine

    def __init__(
        self,
        model: str | Mapping[str, Any] | None = None,
        *,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        options: Iterable[str] = (),
        **keywords: Any,
    ):
        if model is not None:
            keywords["model"] = model
        self.engine = self.engine_class.from_config(config, options=options, **keywords)
        self._joint = JointRun(self.engine)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns their outputs in order.

        One `SamplingParams` serves all prompts, or a list gives each its own. `use_tqdm` shows a progress bar with
        input and output tokens per second. `lora_request`: an adapter that is added to the weights, for all prompts or
        one for each (None: the model as it is); one that is not loaded is read first.

        A prompt or an adapter that is refused raises `RequestError` before anything is computed. Where some fail later,
        `GenerationError` is raised once all are done; its `outputs` are those of all prompts.
        """
        items = as_prompts(prompts)
        params = self._params_per_prompt(sampling_params, len(items))
        if priority is not None and len(priority) != len(items):
            raise RequestError(f"priority has {len(priority)} entries for {len(items)} prompts")
        return self._answer(items, params, lora_request, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Renders one conversation, or several, with the model's chat template and completes them. `lora_request`: as
        in `generate`."""
        if isinstance(messages, str):
            raise RequestError("messages is text: give a list of {'role': ..., 'content': ...}, or use generate")
        if not isinstance(messages, Sequence) or isinstance(messages, bytes | bytearray | memoryview):
            raise RequestError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}")
        if not messages:
            raise RequestError("messages is empty: give at least one message")
        conversations = (
            [cast("Sequence[Message]", messages)]
            if isinstance(messages[0], Mapping)
            else list(cast("Sequence[Sequence[Message]]", messages))
        )
        prompts = [
            self.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> Prompt:
        """The prompt that `chat` would complete: its text and its token ids. Raises `RequestError`."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError("chat needs a tokenizer with a chat template, and this engine has no tokenizer")
        text, token_ids = tokenizer.chat_prompt(messages, **template_options)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """Beam search for each prompt; beams share the KV blocks of what they have in common. Waits until no other
        thread has a request. `lora_request`: an adapter that is added to the weights."""
        search = BeamSearch(self.engine, params, lora_request)
        if lora_request is not None:
            self.engine.add_lora(lora_request)
        items = as_prompts(prompts)
        with GenerationProgress(len(items), enabled=use_tqdm) as progress:
            return [progress.track_prompt(self._search_alone(search, prompt)) for prompt in items]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Computes prompts and returns what is pooled from their hidden states, in order: see `PoolingParams`, of which
        one serves all prompts or each has its own. `pooling_task`: their task, where they name none. `lora_request` and
        errors: as in `generate`."""
        items = as_prompts(prompts)
        params = as_task(pooling_params, len(items), pooling_task)
        return [PoolingRequestOutput.from_request(o) for o in self._answer(items, params, lora_request, None, use_tqdm)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, of length 1 unless `PoolingParams.normalize` is False. Otherwise as `encode`."""
        return [
            EmbeddingRequestOutput.from_base(output)
            for output in self.encode(
                prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task=EMBED
            )
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the checkpoint's labels for each prompt. Refused for a checkpoint without a score head.
        Otherwise as `encode`."""
        return [
            ClassificationRequestOutput.from_base(output)
            for output in self.encode(
                prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task=CLASSIFY
            )
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Scores of every token of each prompt, by the score head of a reward model: `data` is [tokens, labels].
        Otherwise as `encode`."""
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task=TOKEN_CLASSIFY
        )

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, pair by pair; one text of `data_1` goes with each of `data_2`.

        A model with a score head of one label, a cross-encoder, reads both texts of a pair as one prompt. Any other is
        asked for the embeddings of both, and the score is their cosine. Otherwise as `encode`.
        """
        first, second = as_prompts(data_1), as_prompts(data_2)
        firsts, facts = for_each(first, second), self.engine.facts
        if facts.pooling.num_labels == 1:
            has_types, params = facts.num_token_types > 0, as_task(pooling_params, len(second), CLASSIFY)
            most = params[0].truncate_prompt_tokens
            pairs = zip(firsts, second, strict=True)
            joined = [pair_prompt(self.engine.tokenizer, *pair, has_types=has_types, most=most) for pair in pairs]
            return pair_scores(self.encode(joined, params, use_tqdm=use_tqdm, lora_request=lora_request))
        prompts = [*first, *second]  # one that goes with many is embedded once
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task=EMBED)
        return cosines(outputs[: len(first)], outputs[len(first) :])

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with tokenizer_mode none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config recommends."""
        return self.engine.default_sampling_params()

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """See `LLMEngine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache()

    def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `TokenEngine.add_lora`."""
        return self.engine.add_lora(request)

    def remove_lora(self, adapter: str | int) -> None:
        """See `TokenEngine.remove_lora`."""
        self.engine.remove_lora(adapter)

    def list_loras(self) -> list[LoadedLoRA]:
        """See `TokenEngine.list_loras`."""
        return self.engine.list_loras()

    def pin_lora(self, adapter: str | int) -> None:
        """See `TokenEngine.pin_lora`."""
        self.engine.pin_lora(adapter)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Computes nothing for requests that come from now on, until `resume`: other threads' calls wait. Returns once
        nothing is computed for the others either, which end ("abort"), have run to their ends ("wait") or are held
        where they are ("keep"). Raises `RequestError` for another mode."""
        self.engine.pause(mode).result()

    def resume(self) -> None:
        """Requests go on from where they are. Raises `EngineConflict` while the engine sleeps."""
        self.engine.resume()

    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self.engine.is_paused()

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """See `LLMEngine.sleep`."""
        return self.engine.sleep(level, tags)

    def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `LLMEngine.wake_up`."""
        self.engine.wake_up(tags, new_weights=new_weights, for_update=for_update)

    def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before requests."""
        return self.engine.is_sleeping()

    def regions(self) -> tuple[RegionStatus, ...]:
        """See `LLMEngine.regions`."""
        return self.engine.regions()

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """See `WeightUpdates.init_weight_transfer_engine`."""
        self.engine.init_weight_transfer_engine(init_info)

    def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `WeightUpdates.start_weight_update`."""
        return self.engine.start_weight_update(is_checkpoint_format, weight_version=weight_version, partial=partial)

    def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `WeightUpdates.update_weights`."""
        self.engine.update_weights(update_info, drafter=drafter)

    def finish_weight_update(self) -> WeightsReport:
        """See `WeightUpdates.finish_weight_update`."""
        return self.engine.finish_weight_update()

    def abort_weight_update(self) -> None:
        """See `WeightUpdates.abort_weight_update`."""
        self.engine.abort_weight_update()

    def weights(self) -> WeightsReport:
        """Version and checksum of the weights that the engine has. From any thread."""
        return self.engine.weights()

    def shutdown(self) -> None:
        """Stops the engine. Idempotent."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _params_per_prompt(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        check_sampling(given)
        if isinstance(given, SamplingParams):
            return [_final_only(given)] * count
        if len(given) != count:
            raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts")
        return [_final_only(params) for params in given]

    def _adapters_per_prompt(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[LoRARequest | None]:
        if given is None or isinstance(given, LoRARequest):
            return [given] * count
        if not isinstance(given, list | tuple) or not all(one is None or isinstance(one, LoRARequest) for one in given):
            raise RequestError(f"lora_request must be a LoRARequest(name, id, path), or a list of them, got {given!r}")
        if len(given) != count:
            raise RequestError(f"lora_request has {len(given)} entries for {count} prompts")
        return list(given)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: Sequence[int] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        """The last output of each prompt, in order."""
        adapters = self._adapters_per_prompt(lora_request, len(prompts))
        inputs = [
            replace(self.engine.process_input(prompt, p), lora_request=adapter)
            for prompt, p, adapter in zip(prompts, params, adapters, strict=True)
        ]
        for adapter in dict.fromkeys(adapters):
            if adapter is not None:
                self.engine.add_lora(adapter)
        ids = [str(next(self._request_ids)) for _ in prompts]
        with self._joint.joined(ids) as call:
            for index, (request_id, processed) in enumerate(zip(ids, inputs, strict=True)):
                self.engine.add_request(request_id, processed, priority=priority[index] if priority else 0)
            return self._run(call, show_progress)

    def _search_alone(self, search: BeamSearch, prompt: Prompt) -> BeamSearchOutput:
        with self._joint.alone():
            return search.run(prompt)

    def _run(self, call: JointCall, show_progress: bool) -> list[RequestOutput]:
        with GenerationProgress(len(call.request_ids), enabled=show_progress) as progress:
            outputs = self._joint.run(call, progress)
        check_outputs(outputs)
        return outputs


def _final_only(params: SamplingParams) -> SamplingParams:
    """The same parameters, without outputs on the way: nobody would see them."""
    return replace(params, output_kind="final_only")
