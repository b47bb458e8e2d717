"""What a request with `PoolingParams` may ask of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.contracts.engine_client import PoolingFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.pooling_params import EMBED, LABEL_TASKS, PoolingParams
from dovetail.contracts.sampling import SamplingParams

NEUTRAL = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, output_kind="final_only", speculation="off")
"""In place of sampling parameters, for requests from which nothing is sampled."""


def settled(params: PoolingParams, facts: PoolingFacts) -> PoolingParams:
    """The parameters with their task. Raises `RequestError` for what the engine's model cannot serve."""
    task = params.task or EMBED
    if task not in facts.poolers:
        served = ", ".join(facts.poolers) or "none"
        raise RequestError(f"pooling task {task!r} is refused: {facts.refusals.get(task, served)} (served: {served})")
    given = params.use_activation if task not in LABEL_TASKS else None
    if given is not None:
        raise RequestError(f"use_activation is for scores, and the task {task!r} makes embeddings: leave it out")
    if task in LABEL_TASKS and (params.dimensions is not None or params.normalize is not None):
        name = "dimensions" if params.dimensions is not None else "normalize"
        raise RequestError(f"{name} is for embeddings, and the task {task!r} makes scores: leave it out")
    if params.dimensions is not None and params.dimensions > facts.hidden_size:
        raise RequestError(
            f"dimensions is {params.dimensions}, and embeddings of this model have {facts.hidden_size}: ask for 1 to"
            f" {facts.hidden_size}"
        )
    if params.normalize is None and task not in LABEL_TASKS:
        params = replace(params, normalize=facts.normalizes)
    return replace(params, task=task)


def as_task(given: PoolingParams | Sequence[PoolingParams] | None, count: int, task: str | None) -> list[PoolingParams]:
    """Parameters of each of `count` prompts. `task`: of the call; what names none gets it. Raises `RequestError` for
    what are no pooling parameters, or too few, and for parameters that name another task."""
    params = [given] * count if given is None or isinstance(given, PoolingParams) else given
    if isinstance(params, SamplingParams) or not isinstance(params, list | tuple):
        raise RequestError(f"pooling_params must be PoolingParams, or a list of them, got {type(given).__name__}")
    if len(params) != count:
        raise RequestError(f"pooling_params has {len(params)} entries for {count} prompts")
    return [_with_task(one, task) for one in params]


def _with_task(given: PoolingParams | None, task: str | None) -> PoolingParams:
    if given is None:
        return PoolingParams(task=task)
    if not isinstance(given, PoolingParams):
        raise RequestError(
            f"pooling_params must be PoolingParams, got {type(given).__name__}; what is sampled from is for generate"
        )
    if task is None or given.task == task:
        return given
    if given.task is not None:
        raise RequestError(f"pooling_params ask for the task {given.task!r}, and this call is for {task!r}: use encode")
    return replace(given, task=task)


def check_sampling(given: object) -> None:
    """Raises `RequestError` for pooling parameters where sampling parameters belong."""
    if any(isinstance(one, PoolingParams) for one in (given if isinstance(given, list | tuple) else [given])):
        raise RequestError("generate takes SamplingParams, got PoolingParams: use embed, classify, score or encode")
