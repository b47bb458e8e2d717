"""Loads the prompts of an experiment from the bundled set or a file, and chooses among them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from dovetail.commands.checks import nearest, require
from dovetail.commands.datasets import Prompt, parse_prompts, read_prompts
from dovetail.spec_decode.experiments.schema import WorkloadSection

BUILTIN = "builtin"

MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""MT-Bench's categories. Spec-Bench, which holds more than these, counts them as one of its six task groups."""


@dataclass(frozen=True, kw_only=True)
class LaterTurn(Prompt):
    """What the user says after an answer."""

    turn: int
    """Counted from 0, so 1 for the second."""
    conversation: int
    """Index of the prompt that began it."""


def conversation_of(prompt: Prompt) -> int:
    """Index of the prompt that began its conversation, which may be its own."""
    return prompt.conversation if isinstance(prompt, LaterTurn) else prompt.index


@dataclass(frozen=True)
class DataSet:
    """The chosen prompts of a data set."""

    name: str
    format: str
    prompts: Sequence[Prompt]
    sha256: str
    """Of the chosen prompts: categories, texts and predictions, in order."""

    @property
    def num_requests(self) -> int:
        """Prompts with their later turns."""
        return sum(1 + len(prompt.later_turns) for prompt in self.prompts)


def load_prompts(workload: WorkloadSection, folder: Path) -> DataSet:
    """Reads and chooses prompts. Relative paths are resolved against `folder`. Raises `ConfigError` with the line that
    cannot be used."""
    asked = "spec_bench" if workload.format == "speed_bench" else workload.format
    if workload.data == BUILTIN:
        text = resources.files("dovetail.spec_decode.experiments").joinpath("prompts.jsonl").read_text("utf-8")
        name, (shape, prompts) = BUILTIN, parse_prompts(text, BUILTIN, asked)
    else:
        path = folder / workload.data
        name, (shape, prompts) = path.name, read_prompts("workload.data", path, asked)
    require(
        workload.turns == "first" or any(prompt.later_turns for prompt in prompts),
        f"workload.turns is all, and no prompt of {name} has a later turn: write turns: first",
    )
    has_sub_categories = any(prompt.sub_category is not None for prompt in prompts)
    is_speed_bench = shape == "spec_bench" and (workload.format == "speed_bench" or has_sub_categories)
    merges = shape == "spec_bench" and not is_speed_bench
    chosen = _choose(_task_groups(prompts) if merges else prompts, workload)
    return DataSet(name, "speed_bench" if is_speed_bench else shape, chosen, _digest(chosen))


def _task_groups(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if all(prompt.category in MT_BENCH for prompt in prompts):
        return prompts
    return [replace(prompt, category="mt_bench") if prompt.category in MT_BENCH else prompt for prompt in prompts]


def _choose(prompts: Sequence[Prompt], workload: WorkloadSection) -> list[Prompt]:
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    wanted = workload.categories or tuple(by_category)
    for name in wanted:
        require(name in by_category, f"workload.categories: there is no {name!r}; {nearest(name, by_category)}")
    queues = [by_category[name][: workload.per_category] for name in wanted]
    # In turn, so that a limit cuts all categories alike.
    longest = max(len(queue) for queue in queues)
    chosen = [queue[rank] for rank in range(longest) for queue in queues if rank < len(queue)][: workload.limit]
    return chosen if workload.turns == "all" else [replace(prompt, later_turns=()) for prompt in chosen]


def _digest(prompts: Sequence[Prompt]) -> str:
    plain = [
        [prompt.category, prompt.text, prompt.token_ids, *prompt.later_turns, *_digested_prediction(prompt)]
        for prompt in prompts
    ]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode()).hexdigest()


def _digested_prediction(prompt: Prompt) -> list[dict[str, str | tuple[int, ...]]]:
    """Nothing where there is none: sets without predictions keep the digest of older reports."""
    return [] if prompt.prediction is None else [{"prediction": prompt.prediction}]
