"""Spec-Bench's own numbers, so that a report can be held against its published tables.

Xia et al. 2024 (arXiv 2401.07851), and `evaluation/speed.py` of github.com/hemingkx/Spec-Bench, which defines them. One
request runs at a time. Of a question, tokens and seconds are summed over its turns, prompts included:

    tokens/s              mean over questions of tokens / seconds
    speed-up              tokens/s of the method / tokens/s of plain decoding: a ratio of means, no mean of ratios
    mean accepted tokens  tokens per decode step, bonus token included, over all steps of all questions

Each repetition is one of its runs; it reports means over runs, and the standard deviation of the speed-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.spec_decode.experiments.datasets import MT_BENCH
from dovetail.spec_decode.experiments.records import RequestRecord, by_variant
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

TASKS: Mapping[str, str] = {
    "mt_bench": "multi-turn conversation",
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
"""Its six tasks, by the category of their questions; MT-Bench's eight categories are one task."""
OVERALL = "overall"


@dataclass(frozen=True)
class SpecBenchScore:
    """One task, or all, of one variant at batch size 1."""

    arm: str
    length: int | None
    task: str
    questions: int
    mean_accepted: float | None
    """None where no token came after a first step."""
    tokens_per_s: float
    baseline_tokens_per_s: float
    speedup: float
    speedup_deviation: float | None
    """Between runs; None for one run."""


def score_spec_bench(records: Sequence[RequestRecord]) -> list[SpecBenchScore]:
    """Every variant's tasks in Spec-Bench's order, then all questions together. Empty where nothing ran at batch 1."""
    found = {key: own for key, own in by_variant(records).items() if key[0] == 1}
    plain = found.get((1, BASELINE, None))
    if plain is None:
        return []
    scores = []
    for (_, arm, length), own in found.items():
        if arm in (BASELINE, CONTROL):
            continue
        for task in (*TASKS, OVERALL):
            pair = [[r for r in side if task in (_task(r), OVERALL)] for side in (own, plain)]
            if all(pair):
                scores.append(_score(arm, length, task, *pair))
    return scores


def _task(record: RequestRecord) -> str:
    return "mt_bench" if record.category in MT_BENCH else record.category


def _score(
    arm: str, length: int | None, task: str, own: Sequence[RequestRecord], plain: Sequence[RequestRecord]
) -> SpecBenchScore:
    rates, base = _tokens_per_s(own), _tokens_per_s(plain)
    speedups = [rates[run] / base[run] for run in rates if run in base]
    steps = sum(record.decode_steps for record in own)
    return SpecBenchScore(
        arm,
        length,
        task,
        questions=len({record.conversation for record in own}),
        mean_accepted=sum(record.decode_tokens for record in own) / steps if steps else None,
        tokens_per_s=statistics.mean(rates.values()),
        baseline_tokens_per_s=statistics.mean(base.values()),
        speedup=statistics.mean(speedups),
        speedup_deviation=statistics.stdev(speedups) if len(speedups) > 1 else None,
    )


def _tokens_per_s(records: Sequence[RequestRecord]) -> dict[int, float]:
    """By run: the mean over questions."""
    questions: dict[tuple[int, int], list[RequestRecord]] = {}
    for record in records:
        questions.setdefault((record.repetition, record.conversation), []).append(record)
    rates: dict[int, list[float]] = {}
    for (run, _), turns in questions.items():
        rates.setdefault(run, []).append(sum(len(t.token_ids) for t in turns) / sum(t.e2e for t in turns))
    return {run: statistics.mean(own) for run, own in rates.items()}
