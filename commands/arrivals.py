"""When requests arrive: a Poisson process, a burstier or steadier one, all at once, or as a trace says."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.commands.checks import read_text, require
from dovetail.contracts.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""
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
    blocks: Sequence[int] = ()
    """Ids of the prompt's blocks of `BLOCK_TOKENS` tokens, the last one perhaps shorter: equal ids, equal tokens. Empty
    where the trace does not say."""


def parse_rate(text: str, option: str = "--rate") -> float:
    """Requests per second, or infinity. Raises `ConfigError`."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    require(rate > 0, f"{option} {text}: give requests per second, more than 0, or inf for all at once")
    return rate


def draw_arrivals(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0, *, burst_size: int = 1
) -> list[float]:
    """Arrival times in seconds, the first one at 0; `rate` requests per second.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier
    (the gaps' standard deviation over their mean is burstiness ** -0.5), and an infinite one makes all gaps equal.
    `burst_size` requests come at each time, so that gaps have the mean burst_size / rate. An infinite rate: all at 0.
    """
    check_burstiness(burstiness)
    require(rate > 0, f"the rate is {rate}: give more than 0")
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    mean = burst_size / rate
    arrivals, clock = [0.0] * burst_size, 0.0
    while len(arrivals) < count:
        clock += mean if math.isinf(burstiness) else draw.gammavariate(burstiness, mean / burstiness)
        arrivals += [clock] * burst_size
    return arrivals[:count]


def check_burstiness(burstiness: float) -> None:
    """Raises `ConfigError` for a shape that cannot be."""
    require(burstiness > 0, f"--burstiness {burstiness}: give a number more than 0, or inf for equal gaps")


def read_trace(
    path: Path, *, limit: int | None = None, speed: float = 1.0, option: str = "--trace", in_order: bool = False
) -> list[TracedRequest]:
    """Requests of a CSV or JSONL file in order of arrival; `speed` 2 makes them come twice as fast. `in_order` refuses
    a file whose own order is another.

    Columns: the arrival in seconds or as a date (TIMESTAMP, arrival), input tokens (ContextTokens, input_tokens) and
    output tokens (GeneratedTokens, output_tokens), in any case and order. A line with hash_ids is of Mooncake's format:
    its timestamp is in milliseconds, and the ids name the prompt's blocks. Raises `ConfigError` with the line.
    """
    require(speed > 0 and math.isfinite(speed), f"--trace-speed {speed}: give a number more than 0")
    text = read_text(option, path)
    rows = _json_rows(text, f"{option} {path}") if path.suffix.lower() in (".jsonl", ".ndjson") else _csv_rows(text)
    found = [_parse(row, f"{option} {path}:{number}") for number, row in rows]
    require(bool(found), f"{option} {path} has no requests: give a CSV file with a header, or JSON lines in *.jsonl")
    if in_order:
        back = next((i for i, (one, after) in enumerate(pairwise(found), 1) if after.arrival < one.arrival), None)
        require(
            back is None, f"{option} {path}: request {(back or 0) + 1} arrives before the one above it: sort the lines"
        )
    found.sort(key=lambda request: request.arrival)
    start = found[0].arrival
    return [replace(request, arrival=(request.arrival - start) / speed) for request in found[:limit]]


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    for row in reader:
        yield reader.line_num, row


def _json_rows(text: str, origin: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{origin}:{number} is not JSON: {error}") from None
        require(isinstance(row, dict), f"{origin}:{number} is no JSON object")
        yield number, row


def _parse(row: Mapping[str, Any], place: str) -> TracedRequest:
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    values = {name: _column(lower, spellings, place) for name, spellings in _COLUMNS.items()}
    counts: list[int] = []
    for name in ("input", "output"):
        try:
            count = int(values[name])
        except (TypeError, ValueError):
            raise ConfigError(f"{place}: {values[name]!r} is no number of {name} tokens") from None
        # A request that generated nothing was refused or failed; here it asks for one token.
        require(count >= 0, f"{place}: {count} {name} tokens")
        counts.append(max(1, count))
    arrival, blocks = _seconds(values["arrival"], place), lower.get("hash_ids")
    if blocks is None:
        return TracedRequest(arrival, counts[0], counts[1])
    expected = -(-counts[0] // BLOCK_TOKENS)
    is_list = isinstance(blocks, list) and all(isinstance(block, int) for block in blocks)
    require(
        is_list and len(blocks) == expected,
        f"{place}: hash_ids must be {expected} integers, one for each {BLOCK_TOKENS} of {counts[0]} input tokens",
    )
    return TracedRequest(arrival / 1e3, counts[0], counts[1], tuple(blocks))


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
