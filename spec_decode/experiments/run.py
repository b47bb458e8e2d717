"""Runs the turns of an experiment: groups of requests through the engine of their arm, each token's time noted."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail import LLMEngine, SamplingParams
from dovetail.commands.checks import require
from dovetail.commands.datasets import Prompt
from dovetail.commands.machine import Watch
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.telemetry import StepStats
from dovetail.spec_decode.experiments.admission import check_count, fits
from dovetail.spec_decode.experiments.arms import Setup, Variant, drafter_name, reads_prediction
from dovetail.spec_decode.experiments.datasets import DataSet, LaterTurn
from dovetail.spec_decode.experiments.journal import FinishedTurn
from dovetail.spec_decode.experiments.plan import Turn
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL, Experiment, SamplingSection
from dovetail.spec_decode.experiments.serving import Clock, Finished, serve
from dovetail.spec_decode.experiments.steps import StepRecorder

TokenIds = list[int]


@dataclass(frozen=True)
class Workload:
    """The prompts as token ids."""

    prompts: Sequence[Prompt]
    token_ids: Sequence[TokenIds]
    template: str
    """"chat" or "raw"."""
    left_out: int
    """Prompts that were too long."""
    predictions: Mapping[int, TokenIds] = field(default_factory=dict)
    """What the answers to some prompts are expected to be, by the place of the prompt."""


class Bench:
    """Engines that are up, and the variants that run in them."""

    def __init__(self, setup: Setup, experiment: Experiment):
        self.experiment = experiment
        self.engines: list[LLMEngine] = []
        self._recorders: dict[int, StepRecorder] = {}
        self._of: dict[Variant, int] = {}
        try:
            for index, plan in enumerate(setup.engines):
                engine = LLMEngine(plan.resolved)
                self.engines.append(engine)
                self._recorders[index] = StepRecorder()
                engine.add_telemetry_sink(self._recorders[index])
                self._of |= dict.fromkeys(plan.variants, index)
        except BaseException:
            self.close()
            raise
        self._names = 0
        gc.collect()
        # What is there now stays; collections between groups need not look at it again.
        gc.freeze()

    @property
    def variants(self) -> list[Variant]:
        """All, the baseline and its control first."""
        ranks = {BASELINE: 0, CONTROL: 1}
        return sorted(self._of, key=lambda variant: ranks.get(variant.arm, 2))

    def engine_of(self, variant: Variant) -> LLMEngine:
        """The engine in which a variant runs."""
        return self.engines[self._of[variant]]

    def params(self, variant: Variant, *, prediction: Sequence[int] | None = None, **changes: Any) -> SamplingParams:
        """Sampling parameters of the experiment for requests of a variant. `prediction`: of the answer, which requests
        bring where the variant's drafter reads it, since engines refuse it elsewhere."""
        engine, sampling = self.engine_of(variant), self.experiment.sampling
        given: dict[str, Any] = sampling.model_dump(exclude={"seed"})
        if engine.config.speculation is not None:
            given |= {"speculation": drafter_name(variant), "acceptance": variant.acceptance}
        if prediction is not None and reads_prediction(engine.config, variant):
            given["prediction"] = tuple(prediction)
        return SamplingParams(**given | {"detokenize": False, "output_kind": "delta"} | changes)

    def run(
        self,
        variant: Variant,
        prompts: Sequence[TokenIds],
        params: Sequence[SamplingParams],
        *,
        keeps_cache: bool = False,
        arrivals: Sequence[float] | None = None,
    ) -> list[Finished]:
        """One group to its end, on a cold prefix cache or (`keeps_cache`) on what the group before left in it. All
        requests come at once, or each at its time of `arrivals` (seconds, in order). Raises as `serve` does."""
        engine = self.engine_of(variant)
        if not keeps_cache:
            engine.reset_prefix_cache()
        gc.collect()
        self.take_steps(variant)
        self._names += 1
        names = [f"ab-{self._names}-{index}" for index in range(len(prompts))]
        return serve(engine, names, prompts, params, arrivals or [0.0] * len(prompts), Clock())

    def forget_finished(self) -> None:
        """Drafters forget the answers that they have seen."""
        for engine in self.engines:
            engine.forget_finished()

    def take_steps(self, variant: Variant) -> list[StepStats]:
        """Steps of the variant's engine since the last call."""
        return self._recorders[self._of[variant]].take()

    def close(self) -> None:
        """Stops the engines. Idempotent."""
        gc.unfreeze()
        for engine in self.engines:
            engine.shutdown()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_prompts(data: DataSet, engine: LLMEngine, experiment: Experiment) -> Workload:
    """Tokenizes once, with the model's chat template or without. Raises `ConfigError` for prompts that are too long."""
    section, tokenizer = experiment.workload, engine.tokenizer
    has_template = tokenizer is not None and bool(tokenizer.chat_templates)
    template = ("chat" if has_template else "raw") if section.template == "auto" else section.template
    if template == "chat" and not has_template:
        raise ConfigError("workload.template is chat, but the model has no chat template: write raw")
    if section.system is not None and template != "chat":
        raise ConfigError("workload.system needs a chat template: leave it out, or write template: chat")
    kept: list[Prompt] = []
    token_ids: list[TokenIds] = []
    left_out = 0
    predictions: dict[int, TokenIds] = {}
    for prompt in data.prompts:
        ids = _tokens(prompt, engine, template, section.system)
        if fits(prompt, len(ids), data.name, experiment, engine.config.model.max_model_len):
            if prompt.prediction is not None:
                predictions[len(kept)] = _predicted_tokens(prompt, prompt.prediction, engine)
            kept.append(prompt)
            token_ids.append(ids)
        else:
            left_out += 1
    check_count(len(kept), experiment)
    return Workload(kept, token_ids, template, left_out, predictions)


def _predicted_tokens(prompt: Prompt, prediction: str | Sequence[int], engine: LLMEngine) -> TokenIds:
    """As an engine reads a prediction. Raises `ConfigError` for one that engines would refuse."""
    model = engine.config.model
    if not isinstance(prediction, str):
        ids = list(prediction)
    elif engine.tokenizer is not None:
        ids = engine.tokenizer.encode(prediction, add_special_tokens=False)
    else:
        raise ConfigError(f"{prompt.origin}: prediction is text, and this engine has no tokenizer: give token ids")
    require(
        len(ids) <= model.max_model_len,
        f"{prompt.origin}: prediction has {len(ids)} tokens, and max_model_len is {model.max_model_len}: shorten it",
    )
    require(
        all(token < model.vocab_size for token in ids),
        f"{prompt.origin}: prediction has tokens that the model lacks: its token ids are 0 to {model.vocab_size - 1}",
    )
    return ids


def _tokens(prompt: Prompt, engine: LLMEngine, template: str, system: str | None) -> TokenIds:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("the data set is text, and this engine has no tokenizer: give prompt_token_ids")
    assert prompt.text is not None
    if template == "raw":
        return tokenizer.encode(prompt.text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt.text}])
    return tokenizer.encode(text, add_special_tokens=False)


def request_seeds(sampling: SamplingSection, prompts: Sequence[int], repetition: int) -> list[int]:
    """The same in every arm: prompt i of repetition r has its own seed."""
    return [sampling.seed + prompt + 1_000_003 * repetition for prompt in prompts]


def request_params(
    bench: Bench, workload: Workload, variant: Variant, places: Sequence[int], seeds: Sequence[int]
) -> list[SamplingParams]:
    """Sampling parameters of a variant's requests for some prompts, each with its seed and what is predicted of it."""
    return [
        bench.params(variant, prediction=workload.predictions.get(place), seed=seed)
        for place, seed in zip(places, seeds, strict=True)
    ]


def warm_up(bench: Bench, workload: Workload, batch: int, variant: Variant) -> None:
    """Runs a group of prompts read backwards: of the right lengths, and none that a drafter with a memory will meet
    again."""
    places = [index % len(workload.token_ids) for index in range(batch)]
    prompts = [workload.token_ids[place][::-1] for place in places]
    bench.run(variant, prompts, request_params(bench, workload, variant, places, range(batch)))


def run_turn(bench: Bench, workload: Workload, batch: int, turn: Turn[Variant], attempt: int) -> FinishedTurn:
    """One group in one arm, timed. Raises `DovetailError` where a request is refused or fails."""
    variant = turn.what
    seeds = request_seeds(bench.experiment.sampling, turn.prompts, turn.repetition)
    params = request_params(bench, workload, variant, turn.prompts, seeds)
    watch = Watch(f"{variant.label} batch {batch}", turn.repetition)
    finished = bench.run(variant, [workload.token_ids[place] for place in turn.prompts], params)
    span = watch.stop()
    return FinishedTurn(
        arm=variant.arm,
        length=variant.length,
        batch=batch,
        repetition=turn.repetition,
        group=turn.group,
        attempt=attempt,
        requests=[
            _request_record(variant, batch, turn, workload.prompts[place], one)
            for place, one in zip(turn.prompts, finished, strict=True)
        ],
        steps=[_step_record(variant, batch, stats) for stats in bench.take_steps(variant)],
        span=span,
    )


def _request_record(
    variant: Variant, batch: int, turn: Turn[Variant], prompt: Prompt, finished: Finished
) -> RequestRecord:
    assert finished.last is not None
    metrics = finished.last.metrics
    return RequestRecord(
        arm=variant.arm,
        length=variant.length,
        batch=batch,
        repetition=turn.repetition,
        group=turn.group,
        prompt=prompt.index,
        category=prompt.category,
        token_ids=finished.token_ids,
        times=finished.times,
        drafted=metrics.num_drafted,
        accepted=metrics.num_accepted,
        accepted_per_position=metrics.accepted_per_position,
        finish_reason=finished.last.outputs[0].finish_reason or "",
        drafter_error=metrics.drafter_error,
        drafted_per_position=metrics.drafted_per_position,
        **_place_in_conversation(prompt),
    )


def _place_in_conversation(prompt: Prompt) -> dict[str, int]:
    return {"turn": prompt.turn, "first_prompt": prompt.conversation} if isinstance(prompt, LaterTurn) else {}


def _step_record(variant: Variant, batch: int, stats: StepStats) -> StepRecord:
    times = stats.times
    return StepRecord(
        arm=variant.arm,
        length=variant.length,
        batch=batch,
        total=1e3 * stats.duration,
        prepare=times.prepare,
        forward=times.forward,
        sample=times.sample,
        draft=times.draft,
        prompt_tokens=stats.num_prompt_tokens,
        tokens=stats.num_generated_tokens,
        drafted=stats.num_drafted,
        accepted=stats.num_accepted,
        running=stats.num_running,
        kv_blocks=stats.kv_blocks_used,
    )
