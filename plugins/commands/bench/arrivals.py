"""When requests arrive: a Poisson process, a burstier or steadier one, all at once, or as a trace says."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dovetail.commands.checks import read_text, require
from dovetail.contracts.errors import ConfigError

_COLUMNS = {
    "arrival": ("arrival", "arrival_time", "timestamp"),
    "input": ("contexttokens", "input_tokens", "input_length", "prompt_tokens"),
    "output": ("generatedtokens", "output_tokens", "output_length"),
}
"""What each column may be called, in lower case; the first of each row of names are Azure's or ours."""


@dataclass(frozen=True)
class TracedRequest:
    """One line of a trace."""

    arrival: float
    """Seconds since the first request."""
    input_tokens: int
    output_tokens: int


def parse_rate(text: str) -> float:
    """Requests per second, or infinity. Raises `ConfigError`."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    require(rate > 0, f"--rate {text}: give requests per second, more than 0, or inf for all at once")
    return rate


def draw_arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Arrival times in seconds, the first one at 0, with gaps of mean 1 / rate.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier
    (the gaps' standard deviation over their mean is burstiness ** -0.5). An infinite rate: all at 0.
    """
    require(burstiness > 0 and math.isfinite(burstiness), f"--burstiness {burstiness}: give a number more than 0")
    require(rate > 0, f"the rate is {rate}: give more than 0")
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    arrivals = [0.0]
    while len(arrivals) < count:
        arrivals.append(arrivals[-1] + draw.gammavariate(burstiness, 1 / (rate * burstiness)))
    return arrivals[:count]


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> list[TracedRequest]:
    """Requests of a CSV or JSONL file in order of arrival; `speed` 2 makes them come twice as fast.

    Columns: the arrival in seconds or as a date (TIMESTAMP, arrival), input tokens (ContextTokens, input_tokens) and
    output tokens (GeneratedTokens, output_tokens), in any case and order. Raises `ConfigError` with the line.
    """
    require(speed > 0 and math.isfinite(speed), f"--trace-speed {speed}: give a number more than 0")
    text = read_text("--trace", path)
    rows = _json_rows(text, path) if path.suffix.lower() in (".jsonl", ".ndjson") else _csv_rows(text)
    found = [_parse(row, f"--trace {path}:{number}") for number, row in rows]
    require(bool(found), f"--trace {path} has no requests: give a CSV file with a header, or JSON lines in *.jsonl")
    found.sort(key=lambda request: request.arrival)
    start = found[0].arrival
    return [
        TracedRequest((request.arrival - start) / speed, request.input_tokens, request.output_tokens)
        for request in found[:limit]
    ]


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    for row in reader:
        yield reader.line_num, row


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--trace {path}:{number} is not JSON: {error}") from None
        require(isinstance(row, dict), f"--trace {path}:{number} is no JSON object")
        yield number, row


def _parse(row: Mapping[str, Any], place: str) -> TracedRequest:
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    values = {name: _column(lower, spellings, place) for name, spellings in _COLUMNS.items()}
    counts = []
    for name in ("input", "output"):
        try:
            count = int(values[name])
        except (TypeError, ValueError):
            raise ConfigError(f"{place}: {values[name]!r} is no number of {name} tokens") from None
        # A request that generated nothing was refused or failed; here it asks for one token.
        require(count >= 0, f"{place}: {count} {name} tokens")
        counts.append(max(1, count))
    return TracedRequest(_seconds(values["arrival"], place), *counts)


def _column(row: Mapping[str, Any], spellings: Sequence[str], place: str) -> Any:
    for spelling in spellings:
        if row.get(spelling) is not None:
            return row[spelling]
    names = " or ".join(spellings)
    raise ConfigError(f"{place} has no column {names}; it has {', '.join(row)}")


def _seconds(value: Any, place: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        pass
    else:
        require(math.isfinite(seconds), f"{place}: the arrival {value!r} is no time")
        return seconds
    try:
        whole, _, fraction = str(value).strip().partition(".")
        zone = fraction.lstrip("0123456789")
        # Azure's traces have seven digits, one more than fromisoformat keeps.
        digits = fraction.removesuffix(zone)
        return datetime.fromisoformat(whole + zone).timestamp() + (float(f"0.{digits}") if digits else 0.0)
    except ValueError:
        raise ConfigError(f"{place}: the arrival {value!r} is neither seconds nor a date") from None
