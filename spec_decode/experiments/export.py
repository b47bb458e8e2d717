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
    """Without `throughput`, which is `speedup`."""
    rows = [row for row in data["results"] if "load.point" not in row]
    return [{name: value for name, value in row.items() if name.partition(".")[0] != "throughput"} for row in rows]


def _load_results(data: Row) -> list[Row]:
    return [row for row in data["results"] if "load.point" in row]


def _load_requests(data: Row) -> list[Row]:
    load = data.get("load")
    rows = load["requests"] if load is not None else []
    return [{f"{name}_s" if name in _SECONDS else name: value for name, value in row.items()} for row in rows]


_SECONDS = ("arrival", "queued", "ttft", "e2e")
TABLES: Mapping[str, Callable[[Row], list[Row]]] = {
    "requests": _requests,
    "steps": _steps,
    "results": _results,
    "load_requests": _load_requests,
    "load_results": _load_results,
}
_OF_LOAD = ("load_requests", "load_results")


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
    """All of them: requests.csv, steps.csv and results.csv, and of an experiment with a load load_requests.csv and
    load_results.csv. Raises `ConfigError` where they cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        for name in TABLES:
            if name in _OF_LOAD and data.get("load") is None:
                continue
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                write_table(data, name, file)
    except OSError as error:
        raise ConfigError(f"--csv {folder}: cannot be written ({error.strerror}); give another folder") from error
