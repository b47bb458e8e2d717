"""Lines of a batch: requests in, answers out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from dovetail.commands.http import Failure
from dovetail.contracts.errors import ConfigError

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
INVALID_LINE = "invalid_line"
"""The error code of an output line that says why an input line could not be sent."""


@dataclass(frozen=True)
class BatchRequest:
    """One valid line."""

    line: int
    """Counted from 1."""
    custom_id: str
    url: str
    """Path of the endpoint."""
    body: Mapping[str, Any]


@dataclass(frozen=True)
class InvalidLine:
    """A line that cannot be sent."""

    line: int
    """Counted from 1."""
    custom_id: str | None
    """None where the line has none, or is no JSON object."""
    message: str


@dataclass(frozen=True)
class Batch:
    """A file of requests."""

    requests: Sequence[BatchRequest]
    invalid: Sequence[InvalidLine]


class _Invalid(Exception):
    def __init__(self, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.custom_id = custom_id


def read_batch(path: Path, model: str | None, *, needs_model: bool = True) -> Batch:
    """The lines of a file. `model`: for bodies that name none; those are invalid where it is None and `needs_model`.
    Raises `ConfigError` where the file cannot be read.
    """
    requests: list[BatchRequest] = []
    invalid: list[InvalidLine] = []
    first_lines: dict[str, int] = {}
    for number, line in enumerate(_read("--input", path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            request = _parse(number, line, model, needs_model)
            if request.custom_id in first_lines:
                first = first_lines[request.custom_id]
                raise _Invalid(
                    f"custom_id {request.custom_id!r} is that of line {first} too: give each its own", request.custom_id
                )
        except _Invalid as error:
            invalid.append(InvalidLine(number, error.custom_id, str(error)))
            continue
        first_lines[request.custom_id] = number
        requests.append(request)
    return Batch(requests, invalid)


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror}); give a JSONL file") from None


def _parse(number: int, line: bytes, model: str | None, needs_model: bool) -> BatchRequest:
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _Invalid(f"no JSON ({error}): write one object per line") from None
    if not isinstance(data, dict):
        raise _Invalid("no JSON object: write one per line")
    custom_id, method, url, body = (data.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise _Invalid(f"custom_id must be a text, got {custom_id!r}")
    if method != "POST":
        raise _Invalid(f"method must be 'POST', got {method!r}", custom_id)
    if url not in ENDPOINTS:
        raise _Invalid(f"url must be {' or '.join(ENDPOINTS)}, got {url!r}", custom_id)
    if not isinstance(body, dict):
        raise _Invalid(f"body must be an object, got {body!r}", custom_id)
    if body.get("stream"):
        raise _Invalid("body.stream: an answer of a batch is one object; leave stream out", custom_id)
    if body.get("model") is None:
        if model is None and needs_model:
            raise _Invalid("body names no model: name one, or give --model", custom_id)
        body = body if model is None else {**body, "model": model}
    return BatchRequest(number, custom_id, url, body)


def answer_line(custom_id: str, status: int, request_id: str | None, body: Any) -> bytes:
    """The output line of a request that the server answered, with an error or not."""
    response = {"status_code": status, "request_id": request_id or "", "body": body}
    return _output_line(custom_id, response, None)


def failure_line(custom_id: str, failure: Failure) -> bytes:
    """The output line of a request that got no answer."""
    return _output_line(custom_id, None, {"code": failure.kind, "message": failure.message})


def invalid_line(invalid: InvalidLine) -> bytes:
    """The output line of an input line that could not be sent."""
    message = f"line {invalid.line}: {invalid.message}"
    return _output_line(invalid.custom_id, None, {"code": INVALID_LINE, "message": message})


def _output_line(custom_id: str | None, response: Any, error: Any) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    return orjson.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
