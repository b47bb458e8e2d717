"""Scores of pairs of texts: of a model with a score head of one label, that of both as one prompt; else the cosine of
their embeddings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dovetail.contracts.engine_client import EngineClient, EngineFacts
from dovetail.contracts.pooling_params import CLASSIFY, EMBED, PooledStates, PoolingParams
from dovetail.contracts.route import APIError
from dovetail.plugins.routes.pooling.answers import Answer, Input, answers_of, usage_of
from dovetail.plugins.routes.pooling.bodies import RerankRequest, ScoreRequest, field_of, pooling_params
from dovetail.plugins.server.streams import PooledSubmission

Text = str | list[int]
One = TypeVar("One")


@dataclass(frozen=True)
class Side:
    """The texts of one side."""

    field: str
    texts: Sequence[Text]

    def inputs(self) -> list[Input]:
        """Each as a prompt of its own."""
        return [Input(text, field_of(self.field, i, len(self.texts))) for i, text in enumerate(self.texts)]


@dataclass(frozen=True)
class Scores:
    """Of all pairs, in order of the second side."""

    values: list[float]
    usage: dict[str, Any]
    """Tokens that were read: a text that goes with many counts once where it is embedded, and with each as a pair."""


def score_params(body: ScoreRequest | RerankRequest, facts: EngineFacts) -> PoolingParams:
    """What the prompts of a score ask for. Raises `APIError` 400."""
    if facts.pooling.num_labels == 1:
        return pooling_params(body, facts, CLASSIFY, use_activation=body.use_activation)
    if body.use_activation is not None:
        message = "use_activation is for models with a score head of one label, and this one scores by cosines"
        raise APIError(400, f"{message}: leave it out", param="use_activation")
    return pooling_params(body, facts, EMBED)


def check_pairs(first: Side, second: Side) -> None:
    """Raises `APIError` 400 unless it is one with many, or as many with as many."""
    if len(first.texts) not in (1, len(second.texts)):
        message = (
            f"{first.field} has {len(first.texts)} texts and {second.field} {len(second.texts)}: give one with many, or"
            " as many with as many"
        )
        raise APIError(400, message, param=second.field)


async def scores_of(engine: EngineClient, first: Side, second: Side, how: PooledSubmission, at_once: int) -> Scores:
    """The scores of pairs, for which `check_pairs` found nothing wrong."""
    if engine.facts.pooling.num_labels == 1:
        return await _pair_scores(engine, first, second, how, at_once)
    # A text that goes with many is embedded once.
    answers = await answers_of(engine, [*first.inputs(), *second.inputs()], how, _itself, at_once)
    count = len(first.texts)
    # In a thread, which lets streams of others go on between two pairs.
    values = await asyncio.to_thread(_cosines, answers[:count], answers[count:])
    return Scores(values, usage_of(answers))


async def _pair_scores(engine: EngineClient, first: Side, second: Side, how: PooledSubmission, at_once: int) -> Scores:
    firsts = _for_each(first.texts, second.texts)
    pairs = [
        Input(mine, field_of(second.field, i, len(second.texts)), other)
        for i, (mine, other) in enumerate(zip(firsts, second.texts, strict=True))
    ]
    answers = await answers_of(engine, pairs, how, _first_number, at_once)
    return Scores([answer.value for answer in answers], usage_of(answers))


def _cosines(first: Sequence[Answer[PooledStates]], second: Sequence[Answer[PooledStates]]) -> list[float]:
    pairs = zip(_for_each(first, second), second, strict=True)
    return [_cosine(mine.value.floats(), other.value.floats()) for mine, other in pairs]


def _for_each(first: Sequence[One], second: Sequence[Any]) -> list[One]:
    """One of the first side for each of the second, which a single one goes with."""
    return list(first) * (len(second) if len(first) == 1 else 1)


def _cosine(a: list[float], b: list[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    if not lengths:
        return 0.0
    # Rounding may put the quotient of two equal embeddings a bit above 1.
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths))


def _itself(states: PooledStates) -> PooledStates:
    return states


def _first_number(states: PooledStates) -> float:
    return states.floats()[0]
