"""A report's file, read back: to compare, merge, show, foretell or export it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from dovetail.commands.saved import read_saved
from dovetail.spec_decode.experiments.columns import from_columns
from dovetail.spec_decode.experiments.records import RequestRecord


class SavedProvenance(BaseModel):
    """What was measured, where, and how much of it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    date: str
    experiment: dict[str, Any]
    model: dict[str, Any]
    workload: dict[str, Any]
    machine: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    extent: dict[str, Any] = {}
    """Missing in older reports."""


class SavedRequests(BaseModel):
    """Columns of `RequestRecord`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: list[str]
    length: list[int | None]
    batch: list[int]
    repetition: list[int]
    group: list[int]
    prompt: list[int]
    category: list[str]
    token_ids: list[list[int]]
    times: list[list[float]]
    drafted: list[int]
    accepted: list[int]
    accepted_per_position: list[list[int]]
    finish_reason: list[str]
    drafter_error: list[str | None]
    drafted_per_position: list[list[int]] = []
    """Missing in older reports, as what follows."""
    turn: list[int] = []
    first_prompt: list[int | None] = []


class SavedEquality(BaseModel):
    """The verdict on the tokens of one variant at one batch size."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    arm: str
    length: int | None
    batch: int
    verdict: str
    divergences: list[dict[str, Any]]
    control_diverged: int | None = None


class SavedReport(BaseModel):
    """The parts of a report's file that are read back."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    dovetail_ab: Literal[1]
    provenance: SavedProvenance
    requests: SavedRequests
    equality: list[SavedEquality]

    @property
    def ended_by_itself(self) -> bool:
        """Whether the run looked at its results to end when they are decided."""
        return self.provenance.extent.get("decided") is not None

    def records(self) -> list[RequestRecord]:
        """Returns one record per request."""
        columns = self.requests.model_dump()
        return from_columns(RequestRecord, {name: own for name, own in columns.items() if own})


def read_report(path: Path) -> SavedReport:
    """Reads report.json. Raises `ConfigError` that says what is wrong with it."""
    return read_saved(SavedReport, path, "report of `dovetail ab` (format 1)", "write one with --json")
