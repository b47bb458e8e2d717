"""Prompts with categories: our own small set, and files in the shapes of public data sets."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dovetail.commands.checks import nearest, require
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.schema import WorkloadSection

BUILTIN = "builtin"

_MT_BENCH = (
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


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set: its text, or its token ids."""

    index: int
    """Its place in the data set, counted before anything was left out."""
    category: str
    text: str | None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DataSet:
    """What was read and chosen."""

    name: str
    format: str
    prompts: Sequence[Prompt]
    sha256: str
    """Of the chosen prompts: categories and texts, in order."""


def load_prompts(workload: WorkloadSection, folder: Path) -> DataSet:
    """Reads and chooses. Relative paths count from `folder`. Raises `ConfigError` with the line that cannot be used."""
    if workload.data == BUILTIN:
        text = resources.files("dovetail.spec_decode.experiments").joinpath("prompts.jsonl").read_text("utf-8")
        name, origin = BUILTIN, BUILTIN
    else:
        path = folder / workload.data
        text, name, origin = _read(path), path.name, str(path)
    records = list(_records(text, origin))
    require(bool(records), f"workload.data {origin} has no prompts: give one JSON object per line")
    shape = _shape_of(records[0][1]) if workload.format == "auto" else workload.format
    parse = _SHAPES[shape]
    prompts = [parse(index, record, f"{origin}:{line}") for index, (line, record) in enumerate(records)]
    chosen = _choose(_task_groups(prompts) if shape == "spec_bench" else prompts, workload)
    return DataSet(name, shape, chosen, _digest(chosen))


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.data {path}: cannot be read ({error}); give a JSONL file, or builtin") from None


def _records(text: str, origin: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{origin}:{number}: no JSON ({error.msg}); give one object per line") from None
        require(isinstance(record, Mapping), f"{origin}:{number}: not an object; give one JSON object per line")
        yield number, record


def _shape_of(record: Mapping[str, Any]) -> str:
    """By the keys of the first line."""
    if "turns" in record:
        return "spec_bench"
    if "task_id" in record and "entry_point" in record:
        return "humaneval"
    return "gsm8k" if "question" in record and "prompt" not in record else "prompts"


def _text(record: Mapping[str, Any], key: str, place: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: {key!r} must be a text; its keys are {', '.join(map(repr, record)) or 'none'}")
    return value


def _plain(index: int, record: Mapping[str, Any], place: str) -> Prompt:
    category = record.get("category", "all")
    require(isinstance(category, str), f"{place}: category must be a text, got {category!r}")
    ids = record.get("prompt_token_ids")
    if ids is None:
        return Prompt(index, category, _text(record, "prompt", place))
    is_list = isinstance(ids, list) and bool(ids) and all(isinstance(token, int) and token >= 0 for token in ids)
    require(is_list, f"{place}: prompt_token_ids must be a list of token ids")
    return Prompt(index, category, None, tuple(ids))


def _spec_bench(index: int, record: Mapping[str, Any], place: str) -> Prompt:
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ConfigError(f"{place}: turns must be a list of texts; only the first turn is asked")
    return Prompt(index, str(record.get("category", "all")), turns[0])


def _humaneval(index: int, record: Mapping[str, Any], place: str) -> Prompt:
    return Prompt(index, "humaneval", _text(record, "prompt", place))


def _gsm8k(index: int, record: Mapping[str, Any], place: str) -> Prompt:
    return Prompt(index, "gsm8k", _text(record, "question", place))


_SHAPES: Mapping[str, Callable[[int, Mapping[str, Any], str], Prompt]] = {
    "prompts": _plain,
    "spec_bench": _spec_bench,
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
}


def _task_groups(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if all(prompt.category in _MT_BENCH for prompt in prompts):
        return prompts
    return [replace(prompt, category="mt_bench") if prompt.category in _MT_BENCH else prompt for prompt in prompts]


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
    chosen = [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
    return chosen[: workload.limit]


def _digest(prompts: Sequence[Prompt]) -> str:
    plain = [[prompt.category, prompt.text, prompt.token_ids] for prompt in prompts]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode()).hexdigest()
