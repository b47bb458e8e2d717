"""Spec-Bench's numbers: the same as a calculation by its published description gives on the same requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dovetail.spec_decode.experiments.records import RequestRecord
from dovetail.spec_decode.experiments.spec_bench import OVERALL, TASKS, score_spec_bench

TASK_OF_QUESTION = ("writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag", "rag")
RUNS = 3
LENGTH = 4


@dataclass
class Answer:
    """A line of an answer file, as its `eval.py` writes them: one value per turn, or per decode step."""

    category: str
    new_tokens: list[int]
    wall_time: list[float]
    accept_lengths: list[int]


def play(arm: str, length: int | None) -> Iterator[tuple[list[RequestRecord], list[list[Answer]]]]:
    """Requests of one arm, and what Spec-Bench would have noted of them, run by run."""
    random = np.random.default_rng(0 if length is None else 1)
    for run in range(RUNS):
        records: list[RequestRecord] = []
        answers: list[Answer] = []
        for question, category in enumerate(TASK_OF_QUESTION):
            answer = Answer(category, [], [], [])
            for turn in range(2 if category in ("writing", "coding") else 1):
                # The first token comes with the prompt's step, then several a step.
                times, clock = [float(random.uniform(0.1, 0.5))], 0.0
                clock = times[0]
                for _ in range(int(random.integers(3, 12))):
                    clock += float(random.uniform(0.02, 0.06))
                    count = int(random.integers(1, LENGTH + 2)) if length is not None else 1
                    times += [clock] * count
                    answer.accept_lengths.append(count)
                answer.new_tokens.append(len(times))
                answer.wall_time.append(times[-1])
                records.append(request(arm, length, run, question, turn, category, times))
            answers.append(answer)
        yield records, [answers]


def request(
    arm: str, length: int | None, run: int, question: int, turn: int, category: str, times: Sequence[float]
) -> RequestRecord:
    place: dict[str, Any] = {"turn": turn, "first_prompt": question} if turn else {}
    return RequestRecord(
        arm=arm,
        length=length,
        batch=1,
        repetition=run,
        group=question,
        prompt=question + 100 * turn,
        # As the data set is read: MT-Bench's categories as one, or as they are.
        category="mt_bench" if category == "writing" else category,
        token_ids=[1] * len(times),
        times=times,
        drafted=0,
        accepted=0,
        accepted_per_position=[],
        finish_reason="length",
        **place,
    )


def published(runs: Sequence[Sequence[Answer]], base: Sequence[Sequence[Answer]], task: str) -> tuple[float, ...]:
    """By the description: of each question all turns' new tokens by all their wall time; the mean over questions, as a
    ratio to the baseline's mean; the mean and the deviation (one degree of freedom less) of that ratio over the runs.
    The accepted lengths of all runs in one heap."""
    members = {"mt_bench": ("writing", "coding")}.get(task, (task,))
    ratios, heap = [], []
    for own, plain in zip(runs, base, strict=True):
        means = []
        for side in (own, plain):
            chosen = [a for a in side if task == OVERALL or a.category in members]
            means.append(np.mean([sum(a.new_tokens) / sum(a.wall_time) for a in chosen]))
        ratios.append(means[0] / means[1])
        heap += [n for a in own if task == OVERALL or a.category in members for n in a.accept_lengths]
    return float(np.mean(heap)), float(np.mean(ratios)), float(np.std(ratios, ddof=1))


def test_every_task_has_the_published_numbers() -> None:
    played = {arm: list(play(arm, length)) for arm, length in (("plain", None), ("fast", LENGTH))}
    records = [record for arm in played.values() for own, _ in arm for record in own]
    answers = {arm: [noted[0] for _, noted in runs] for arm, runs in played.items()}
    found = {score.task: score for score in score_spec_bench(records)}
    assert list(found) == [*TASKS, OVERALL]
    for task, score in found.items():
        accepted, speedup, deviation = published(answers["fast"], answers["plain"], task)
        assert score.mean_accepted == pytest.approx(accepted)
        assert score.speedup == pytest.approx(speedup)
        assert score.speedup_deviation == pytest.approx(deviation)
    assert found[OVERALL].questions == len(TASK_OF_QUESTION)
    assert found["mt_bench"].questions == 2
    # No ratio of totals: long questions do not weigh more.
    plain, fast = ([a for run in answers[arm] for a in run] for arm in ("plain", "fast"))
    totals = [sum(sum(a.new_tokens) for a in side) / sum(sum(a.wall_time) for a in side) for side in (fast, plain)]
    assert found[OVERALL].speedup != pytest.approx(totals[0] / totals[1], rel=1e-3)


def test_it_is_about_one_request_at_a_time() -> None:
    records = [record for own, _ in play("plain", None) for record in own]
    assert score_spec_bench(records) == []
    assert score_spec_bench([]) == []
