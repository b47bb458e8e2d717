"""What was measured, as it goes into report.json: one record per request and one per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

Key = tuple[int, str, int | None]
"""Batch size, arm, draft length."""


def label_of(arm: str, length: int | None, *, is_fixed: bool = True) -> str:
    """A variant's name in tables: @ a number of drafts in every round, or <= it."""
    return arm if length is None else f"{arm}{'@' if is_fixed else '<='}{length}"


def label_among(arms: Mapping[str, Mapping[str, Any]], arm: str, length: int | None) -> str:
    """The same, of an arm of a report's provenance."""
    return label_of(arm, length, is_fixed=arms.get(arm, {}).get("speculative.drafter.length", "fixed") == "fixed")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are seconds from the start of its group."""

    arm: str
    length: int | None
    batch: int
    repetition: int
    group: int
    prompt: int
    """Index of the prompt in the data set."""
    category: str
    token_ids: Sequence[int]
    times: Sequence[float]
    """When each token came; those of one step came together."""
    drafted: int
    accepted: int
    accepted_per_position: Sequence[int]
    """Steps in which at least one draft token was accepted, at least two, ..."""
    finish_reason: str
    drafter_error: str | None = None
    drafted_per_position: Sequence[int] = ()
    """Rounds in which at least one draft was verified, at least two in a row, ..."""
    turn: int = 0
    """Of its conversation, counted from 0."""
    first_prompt: int | None = None
    """Of a later turn: index of the prompt that began its conversation."""

    @property
    def conversation(self) -> int:
        """Index of the prompt that began its conversation, which may be its own."""
        return self.prompt if self.first_prompt is None else self.first_prompt

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.times[0]

    @property
    def e2e(self) -> float:
        """Seconds until the last token."""
        return self.times[-1]

    @property
    def itl(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def decode_tokens(self) -> int:
        """Tokens after those of the first step."""
        first = self.times[0]
        return sum(time > first for time in self.times)

    @property
    def rounds(self) -> int:
        """Steps in which drafts of the request were verified."""
        return self.drafted_per_position[0] if self.drafted_per_position else 0

    @property
    def decode_steps(self) -> int:
        """Steps that brought tokens, after the first one."""
        return len(set(self.times)) - 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine. Milliseconds."""

    arm: str
    length: int | None
    batch: int
    total: float
    """From scheduling to committed tokens."""
    prepare: float
    forward: float
    sample: float
    draft: float
    prompt_tokens: int
    """Computed in this step; 0 in steps that only decode or verify."""
    tokens: int
    drafted: int
    accepted: int
    running: int
    kv_blocks: int

    @property
    def host(self) -> float:
        """Scheduling, planning, committing, and handing over to workers."""
        return max(0.0, self.total - self.prepare - self.forward - self.sample - self.draft)


def by_variant(requests: Sequence[RequestRecord]) -> Mapping[Key, list[RequestRecord]]:
    """Records by (batch, arm, length): batches in order, the baseline and its control first."""
    found: dict[Key, list[RequestRecord]] = {}
    for record in requests:
        found.setdefault((record.batch, record.arm, record.length), []).append(record)
    places = {BASELINE: 0, CONTROL: 1}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], places.get(item[0][1], 2), *item[0][1:])))


def by_conversation(records: Sequence[RequestRecord]) -> dict[int, list[RequestRecord]]:
    """Records by conversation: its turns are alike, so that intervals draw them together."""
    found: dict[int, list[RequestRecord]] = {}
    for record in records:
        found.setdefault(record.conversation, []).append(record)
    return found


def clusters_of_groups(records: Sequence[RequestRecord]) -> dict[int, int]:
    """By group of prompts, the first of those that hold other turns of the same conversations, or itself: turns of a
    conversation are alike, so that these groups are one observation."""
    clusters = {record.group: record.group for record in records}
    for own in by_conversation(records).values():
        if len({record.prompt for record in own}) > 1:
            joined = {clusters[record.group] for record in own}
            clusters = {group: min(joined) if of in joined else of for group, of in clusters.items()}
    return clusters


def by_prompt(records: Sequence[RequestRecord]) -> dict[int, list[RequestRecord]]:
    """Records by prompt, each prompt's in the order in which they ran."""
    found: dict[int, list[RequestRecord]] = {}
    for record in records:
        found.setdefault(record.prompt, []).append(record)
    return found
