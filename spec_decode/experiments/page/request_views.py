"""What single requests show: the data of the page's plots of prompts, of accepted lengths, and of places in the output.

A decode step is known by its time: tokens of one step came together. The last step of a request is left out wherever
lengths are counted, since `max_tokens`, a stop string or the end of the text may have cut it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dovetail.spec_decode.experiments.records import RequestRecord, by_prompt

_MIN_PROMPTS = 5
"""Prompts that a place in the output needs, to be shown."""


@dataclass(frozen=True)
class PromptView:
    """One prompt in one arm."""

    prompt: int
    category: str
    accepted_length: float
    """Tokens per decode step, bonus token included."""
    speedup: float
    """Tokens per second of its requests over those of the baseline: geometric mean over repetitions."""


def prompt_views(own: Sequence[RequestRecord], baseline: Sequence[RequestRecord]) -> list[PromptView]:
    """Returns the prompts of one arm at one batch size, in order; those without a decode step are left out."""
    rates = {(r.prompt, r.repetition, r.group): _rate(r) for r in baseline}
    found = []
    for prompt, records in sorted(by_prompt(own).items()):
        logs = [math.log(_rate(r) / rates[key]) for r in records if (key := (r.prompt, r.repetition, r.group)) in rates]
        steps = sum(r.decode_steps for r in records)
        if logs and steps:
            length = sum(r.decode_tokens for r in records) / steps
            found.append(PromptView(prompt, records[0].category, length, math.exp(sum(logs) / len(logs))))
    return found


def _rate(record: RequestRecord) -> float:
    return len(record.token_ids) / record.e2e


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of one request."""

    start: int
    """Place in the output of its first token; the first token of all has 0."""
    tokens: int


def decode_steps(record: RequestRecord) -> list[DecodeStep]:
    """Returns the decode steps of a request in order, without the last one."""
    counts = [len(list(own)) for _, own in groupby(record.times)]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [DecodeStep(start, tokens) for start, tokens in zip(starts, counts, strict=True)][1:-1]


def length_shares(records: Sequence[RequestRecord]) -> list[float]:
    """Returns the share of decode steps that brought 1, 2, ... tokens, up to the longest; empty without steps."""
    counts = Counter(step.tokens for record in records for step in decode_steps(record))
    total = sum(counts.values())
    return [counts[tokens] / total for tokens in range(1, max(counts, default=0) + 1)]


def lengths_by_place(records: Sequence[RequestRecord], width: int) -> list[tuple[float, float]]:
    """Returns (middle of the places, tokens per decode step) for each `width` places of the output that at least
    `_MIN_PROMPTS` prompts reach."""
    steps: dict[int, list[int]] = {}
    prompts: dict[int, set[int]] = {}
    for record in records:
        for step in decode_steps(record):
            steps.setdefault(step.start // width, []).append(step.tokens)
            prompts.setdefault(step.start // width, set()).add(record.prompt)
    return [
        ((place + 0.5) * width, sum(tokens) / len(tokens))
        for place, tokens in sorted(steps.items())
        if len(prompts[place]) >= _MIN_PROMPTS
    ]


def place_width(records: Sequence[RequestRecord], count: int = 12) -> int:
    """Returns a width of places that divides the longest output into about `count`."""
    longest = max((len(record.token_ids) for record in records), default=1)
    return max(1, round(longest / count))


def of_batch(
    records: Mapping[tuple[int, str, int | None], Sequence[RequestRecord]], batch: int
) -> Iterator[tuple[str, int | None, Sequence[RequestRecord]]]:
    """Yields arm, length and records of one batch size."""
    for (own, arm, length), found in records.items():
        if own == batch:
            yield arm, length, found
