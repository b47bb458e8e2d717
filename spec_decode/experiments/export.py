"""A report as flat tables, for spreadsheets and data frames: one row per request, step or result."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from dovetail.commands.checks import read_text
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.columns import from_columns
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord
from dovetail.spec_decode.experiments.saved_report import read_report

Row = Mapping[str, Any]

_REQUEST: Mapping[str, Callable[[RequestRecord], Any]] = {
    "arm": lambda r: r.arm,
    "length": lambda r: r.length,
    "batch": lambda r: r.batch,
    "repetition": lambda r: r.repetition,
    "group": lambda r: r.group,
    "prompt": lambda r: r.prompt,
    "category": lambda r: r.category,
    "conversation": lambda r: r.conversation,
    "turn": lambda r: r.turn,
    "tokens": lambda r: len(r.token_ids),
    "ttft_s": lambda r: r.ttft,
    "itl_s": lambda r: r.itl,
    "e2e_s": lambda r: r.e2e,
    "decode_steps": lambda r: r.decode_steps,
    "decode_tokens": lambda r: r.decode_tokens,
    "rounds": lambda r: r.rounds,
    "drafted": lambda r: r.drafted,
    "accepted": lambda r: r.accepted,
    "accepted_per_position": lambda r: _numbers(r.accepted_per_position),
    "drafted_per_position": lambda r: _numbers(r.drafted_per_position),
    "finish_reason": lambda r: r.finish_reason,
    "drafter_error": lambda r: r.drafter_error,
}
_STEP: Mapping[str, Callable[[StepRecord], Any]] = {
    "arm": lambda s: s.arm,
    "length": lambda s: s.length,
    "batch": lambda s: s.batch,
    "total_ms": lambda s: s.total,
    "draft_ms": lambda s: s.draft,
    "prepare_ms": lambda s: s.prepare,
    "forward_ms": lambda s: s.forward,
    "sample_ms": lambda s: s.sample,
    "host_ms": lambda s: s.host,
    "prompt_tokens": lambda s: s.prompt_tokens,
    "tokens": lambda s: s.tokens,
    "drafted": lambda s: s.drafted,
    "accepted": lambda s: s.accepted,
    "running": lambda s: s.running,
    "kv_blocks": lambda s: s.kv_blocks,
}


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _requests(data: Row) -> list[Row]:
    records = from_columns(RequestRecord, data["requests"])
    return [{name: value(record) for name, value in _REQUEST.items()} for record in records]


def _steps(data: Row) -> list[Row]:
    records = from_columns(StepRecord, data["step_samples"])
    return [{name: value(record) for name, value in _STEP.items()} for record in records]


def _results(data: Row) -> list[Row]:
    return list(data["results"])


TABLES: Mapping[str, Callable[[Row], list[Row]]] = {"requests": _requests, "steps": _steps, "results": _results}


def read_tables(path: Path) -> Row:
    """The data of a report's file. Raises `ConfigError` where it is none."""
    read_report(path)
    found: Row = json.loads(read_text("REPORT.json", path))
    return found


def write_table(data: Row, name: str, file: TextIO) -> None:
    """One of `TABLES` as CSV with a header line; what was not measured is an empty cell.

    `data`: a report as `report.as_data` returns it, or as report.json has it.
    """
    rows = TABLES[name](data)
    columns: Iterable[str] = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def write_tables(data: Row, folder: Path) -> None:
    """All of them: requests.csv, steps.csv and results.csv. Raises `ConfigError` where they cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        for name in TABLES:
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                write_table(data, name, file)
    except OSError as error:
        raise ConfigError(f"--csv {folder}: cannot be written ({error.strerror}); give another folder") from error
