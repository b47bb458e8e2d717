"""`RolloutModule`: an engine that writes rollouts, in the shape of ChatLearn's modules.

    module = RolloutModule(model="./my-model", model_args=ModuleOptions(seq_length=512, max_new_tokens=256))
    module.setup()
    dataset = module.build_dataset(prompts)
    rollouts = module.forward_step(dataset.collate_fn(dataset.data))

ChatLearn itself is not needed, and no process is started for the module: whoever runs it chooses. `forward_step` runs
all steps; a driver that owns the loop runs them itself:

    module._add_request(data)
    while module.num_requests:
        module.execute_step(module.schedule())
    rollouts = module.decode_internal(module.outputs)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.config.layers import LayeredConfig
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError, RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.engine import LLMEngine
from dovetail.engine.failure import check_outputs
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.step_loop import ScheduledStep
from dovetail.rl.module_options import ModuleOptions
from dovetail.rl.prompt_dataset import PromptDataset, decoded, prompts_of
from dovetail.rl.refits import check_transport
from dovetail.rl.rollout_batch import Batch, Result


class RolloutModule:
    """An engine for rollouts, of which one thread at a time uses the methods. What it takes and returns:
    `prompt_dataset`. Every method but `setup` and `shutdown` raises `RequestError` before `setup`."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        model_args: ModuleOptions,
        options: Iterable[str] = (),
        **keywords: Any,
    ):
        """`config`, `options` and `keywords`: as `LLMEngine.from_config`. Raises `ConfigError`."""
        self.model_args = model_args
        self._config = load_config(config, keywords=keywords, overrides=options)
        self._engine: LLMEngine | None = None
        self._is_connected = False
        self._request_numbers = itertools.count()
        self._pending: dict[str, int] = {}
        """By id, the index in their batch of requests that have not ended."""
        self._ended: dict[int, RequestOutput] = {}
        """By index in the batch, the last outputs."""

    def setup(self) -> None:
        """Makes the engine; without effect where there is one. Raises as `LLMEngine.from_config`, and `ConfigError`
        where `seq_length` is more than the model takes."""
        if self._engine is not None:
            return
        engine = self.model_provider()
        limit = engine.facts.max_model_len
        if self.model_args.seq_length > limit:
            engine.shutdown()
            raise ConfigError(
                f"seq_length is {self.model_args.seq_length}, and the engine takes {limit} tokens: lower it, or raise"
                " model.max_model_len"
            )
        self._engine = engine

    def model_provider(self) -> LLMEngine:
        """A new engine of the config. `setup` calls it."""
        return LLMEngine.from_config(self._config)

    @property
    def engine(self) -> LLMEngine:
        """The engine, for sleep, pauses, metrics and the rest."""
        if self._engine is None:
            raise RequestError("the module has no engine: call setup first")
        return self._engine

    def build_dataset(self, prompts: Sequence[Any], is_eval: bool = False) -> PromptDataset:
        """A dataset of prompts: each `num_inference_per_prompt` times, or once for evaluation. `prompts`: see
        `PromptDataset`, whose errors it raises."""
        engine, options = self.engine, self.model_args
        params = options.sampling_params(1, is_eval=is_eval, with_text=engine.tokenizer is not None)
        return PromptDataset(
            prompts,
            options,
            1 if is_eval else options.num_inference_per_prompt,
            lambda text: engine.process_input(text, params).token_ids,
        )

    def forward_step(self, data: Batch, iteration: int = 0) -> Result:
        """Completes the prompts of a batch, sampled for training. `iteration`: of the caller, who counts; it changes
        nothing. Raises `RequestError` for a batch that is refused, `EngineConflict` while the engine is paused or a
        batch is unfinished, `GenerationError` where requests failed, and as `LLMEngine.step` does."""
        return self._forward(data, is_eval=False)

    def eval_forward(self, data: Batch, iteration: int = 0) -> Result:
        """As `forward_step`, sampled as the options that begin with `eval_` say."""
        return self._forward(data, is_eval=True)

    def decode_internal(self, batched_outputs: Sequence[RequestOutput]) -> Result:
        """Tensors and texts of outputs of this module: keys, shapes and dtypes in `prompt_dataset`. Raises
        `GenerationError` where requests failed, `RequestError` for outputs of other requests."""
        check_outputs(batched_outputs)
        return decoded(batched_outputs, self.model_args)

    def _add_request(self, data: Batch, is_eval: bool = False) -> None:
        """Queues the prompts of a batch, and forgets the outputs of the one before. Raises `RequestError`, and queues
        none, where one is refused; `EngineConflict` while a batch is unfinished."""
        engine = self.engine
        if self.num_requests:
            raise EngineConflict(
                f"{self.num_requests} requests of the batch before are unfinished: call execute_step until"
                " num_requests is 0, or abort_requests"
            )
        inputs = [self._processed(*prompt, is_eval) for prompt in prompts_of(data, self.model_args)]
        self._pending, self._ended = {}, {}
        try:
            for index, processed in enumerate(inputs):
                request_id = f"rollout-{next(self._request_numbers)}"
                engine.add_request(request_id, processed)
                self._pending[request_id] = index
        except BaseException:
            self.abort_requests()
            self._ended = {}
            raise

    @property
    def num_requests(self) -> int:
        """Requests of the batch that have not ended."""
        if not self._pending:
            return 0
        return len(self._pending.keys() & set(self.engine.request_ids))

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of the requests of the batch that ended, in the order of their prompts."""
        return [output for _, output in sorted(self._ended.items())]

    def schedule(self) -> ScheduledStep | None:
        """See `LLMEngine.schedule`."""
        return self.engine.schedule()

    def execute_step(self, scheduled: ScheduledStep | None) -> int:
        """Executes what `schedule` returned, keeps the outputs of requests that ended, and returns `num_requests`.
        None: waits until there is something to schedule, for instance until another thread resumes what it holds.

        Raises as `LLMEngine.execute_step` does, `WorkerError` where the engine is shut down meanwhile.
        """
        if scheduled is None:
            self._wait_for_work()
        else:
            self._collect(self.engine.execute_step(scheduled))
        return self.num_requests

    def abort_requests(self) -> None:
        """Ends what is left of the batch; `outputs` have what it wrote so far, with finish_reason "abort"."""
        self._collect(self.engine.abort_request(list(self._pending)))
        self._pending = {}

    def pre_parameter_sync(self, weight_version: int | None = None) -> int:
        """Begins an update of all weights, and returns its version: `WeightUpdates.start_weight_update`, whose errors
        it raises. Raises `ConfigError` for another `weight_transport` than `in_process`."""
        check_transport(self.engine.config, "in_process", "pre_parameter_sync")
        if not self._is_connected:
            self.engine.init_weight_transfer_engine()
            self._is_connected = True
        return self.engine.start_weight_update(weight_version=weight_version)

    def parameter_sync(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes some of the weights, with the names and shapes of the model's checkpoint. Raises as
        `WeightUpdates.update_weights` does; the update is ended then, and the old weights serve on."""
        self.engine.update_weights({"weights": list(bucket)})

    def post_parameter_sync(self) -> WeightsReport:
        """Ends the update: `WeightUpdates.finish_weight_update`, whose errors it raises."""
        return self.engine.finish_weight_update()

    def shutdown(self) -> None:
        """Ends the engine. Idempotent."""
        if self._engine is not None:
            self._engine.shutdown()

    def _forward(self, data: Batch, *, is_eval: bool) -> Result:
        if self.engine.is_paused():
            raise EngineConflict("the engine is paused, and the batch would be held: call engine.resume first")
        self._add_request(data, is_eval)
        try:
            while self.num_requests:
                self.execute_step(self.schedule())
            if self._pending:
                raise RequestError(
                    f"{next(iter(self._pending))} ended without a last output: something else aborted it or drove the"
                    " engine"
                )
        except BaseException:
            self.abort_requests()
            raise
        return self.decode_internal(self.outputs)

    def _processed(self, text: str | None, token_ids: list[int], is_eval: bool) -> ProcessedInput:
        options = self.model_args
        params = options.sampling_params(
            options.max_tokens(len(token_ids)), is_eval=is_eval, with_text=self.engine.tokenizer is not None
        )
        if text is None:
            return self.engine.process_input({"prompt_token_ids": token_ids}, params)
        return self.engine.process_input({"prompt": text, "prompt_token_ids": token_ids}, params)

    def _collect(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.finished and output.request_id in self._pending:
                self._ended[self._pending.pop(output.request_id)] = output

    def _wait_for_work(self) -> None:
        engine = self.engine
        with engine.wakeup:
            engine.wakeup.wait_for(lambda: engine.is_runnable or engine.is_closed or not self.num_requests)
        if engine.is_closed:
            raise WorkerError("the engine was shut down while requests were held: they have failed")
