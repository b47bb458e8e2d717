"""The journal of a run: what each turn brought, on disk before the next one starts.

A file of JSON lines. The first says of which experiment, model, prompts and machine it is; then one line for each start
(`session`) and one for each finished turn. A line is one write, flushed and synced, so that a process that is killed
loses the turn that it was in, and a last line that was cut off is recognised and dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BufferedRandom
from pathlib import Path
from typing import Any
from uuid import uuid4

from dovetail.commands.checks import require
from dovetail.commands.machine import Span
from dovetail.commands.saved import differences
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.columns import from_columns, plain, to_columns
from dovetail.spec_decode.experiments.load.records import FinishedSegment, LoadRecord, SegmentKey
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord

FORMAT = 1
TurnKey = tuple[int, int, int, int, str, int | None]
"""Batch size, repetition, group, attempt, arm, draft length."""


@dataclass(frozen=True)
class FinishedTurn:
    """One group of prompts in one arm, as it went."""

    arm: str
    length: int | None
    batch: int
    repetition: int
    group: int
    attempt: int
    """How often the round was run before."""
    requests: Sequence[RequestRecord] = ()
    steps: Sequence[StepRecord] = ()
    span: Span | None = None
    failure: str | None = None
    """Why there are no requests."""

    @property
    def key(self) -> TurnKey:
        """What distinguishes it in its experiment."""
        return (self.batch, self.repetition, self.group, self.attempt, self.arm, self.length)


def default_journal(experiment: Path) -> Path:
    """The journal of an experiment file: in its folder, so that who looks for one finds the other."""
    return experiment.with_suffix(".ab.jsonl")


class Journal:
    """What has finished, kept in an open file, or in memory alone where there is none."""

    def __init__(self, file: BufferedRandom | None = None, sessions: Sequence[Mapping[str, Any]] = ()):
        self.turns: dict[TurnKey, FinishedTurn] = {}
        """What has finished, in the order in which it ran; in earlier sessions too."""
        self.segments: dict[SegmentKey, FinishedSegment] = {}
        """Likewise, of an open-loop load."""
        self.run = uuid4().hex
        """What tells this run from all others; a run that goes on keeps it."""
        self._file = file
        self._sessions = list(sessions)

    @property
    def num_sessions(self) -> int:
        """How often a process has started to measure."""
        return len(self._sessions)

    def begin(self, token_ids_sha256: str) -> None:
        """A session starts. Raises `ConfigError` where prompts have other tokens than in earlier ones."""
        same = all(session["token_ids_sha256"] == token_ids_sha256 for session in self._sessions)
        require(same, f"--resume: the prompts have other tokens than in the journal (another tokenizer?): {_REMEDY}")
        session = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "token_ids_sha256": token_ids_sha256}
        self._sessions.append(session)
        self._write({"session": session})

    def append(self, turn: FinishedTurn) -> None:
        """Writes a turn; it is on disk afterwards. Raises `ConfigError` where it cannot be written."""
        self.turns[turn.key] = turn
        self._write({"turn": _encode(turn)})

    def append_segment(self, segment: FinishedSegment) -> None:
        """Does what `append` does, for a segment of an open-loop load."""
        self.segments[segment.key] = segment
        bare: dict[str, Any] = plain(replace(segment, requests=()))
        self._write({"segment": bare | {"requests": to_columns(segment.requests)}})

    def write_header(self, identity: Mapping[str, Any]) -> None:
        """Starts the file anew."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
        self._write({"dovetail_ab_journal": FORMAT, "run": self.run, "identity": identity})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"the journal cannot be written ({error.strerror}); --resume goes on") from error


_START = b'{"dovetail_ab_journal"'
_REMEDY = "measure it anew with another --journal, or go back to what it was"


@contextmanager
def open_journal(path: Path, identity: Mapping[str, Any], *, resume: bool) -> Iterator[Journal]:
    """Opens the journal of an experiment, one process at a time.

    Args:
        identity: plain data that says what is measured, and on what.
        resume: go on with what it has; else it may have no turn.

    Raises `ConfigError` for a journal that is there without `resume`, one that is not there with it, one of something
    else (with the keys that differ), and one that another process has open.
    """
    require(not resume or path.exists(), f"--resume: there is no journal {path}; leave --resume out to start one")
    try:
        file = path.open("r+b" if path.exists() else "x+b")
    except OSError as error:
        raise ConfigError(f"--journal {path}: cannot be written ({error.strerror}); give another path") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path}: another process writes this journal; wait for it, or give another") from error
        journal = _read(path, file, plain(identity), resume=resume)
        try:
            yield journal
        finally:
            if not journal.turns:
                # Nothing to go on with.
                path.unlink(missing_ok=True)


def _read(path: Path, file: BufferedRandom, identity: Mapping[str, Any], *, resume: bool) -> Journal:
    raw = file.read()
    # Behind the last newline is nothing, or a line that was cut off.
    whole = raw[: raw.rfind(b"\n") + 1]
    lines = [_parse(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]
    is_journal = lines[0].get("dovetail_ab_journal") == FORMAT if lines else raw[: len(_START)] == _START[: len(raw)]
    require(is_journal, f"{path} is there and no journal of `dovetail ab` (format {FORMAT}): give another --journal")
    turns = [_decode(path, number, line["turn"]) for number, line in enumerate(lines, 1) if "turn" in line]
    if not turns:
        journal = Journal(file)
        journal.write_header(identity)
        return journal
    require(
        resume,
        f"{path} has {len(turns)} turns already: --resume goes on with them; to measure anew, remove it or give another"
        " --journal",
    )
    if differing := list(differences(lines[0]["identity"], identity)):
        raise ConfigError(f"{path} is of something else: {'; '.join(differing)} (there / here): {_REMEDY}")
    file.truncate(len(whole))
    file.seek(len(whole))
    journal = Journal(file, [line["session"] for line in lines if "session" in line])
    journal.run = lines[0].get("run", journal.run)
    journal.turns = {turn.key: turn for turn in turns}
    segments = [_decode_segment(path, i, line["segment"]) for i, line in enumerate(lines, 1) if "segment" in line]
    journal.segments = {segment.key: segment for segment in segments}
    return journal


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}:{number}: no line of a journal: the file is damaged, or another; give another path")
    return found


def _encode(turn: FinishedTurn) -> dict[str, Any]:
    bare: dict[str, Any] = plain(replace(turn, requests=(), steps=()))
    return bare | {"requests": to_columns(turn.requests), "steps": to_columns(turn.steps)}


def _decode(path: Path, number: int, data: Mapping[str, Any]) -> FinishedTurn:
    try:
        requests = from_columns(RequestRecord, data["requests"])
        steps = from_columns(StepRecord, data["steps"])
        span = None if data["span"] is None else Span(**data["span"])
        return FinishedTurn(**{**data, "requests": requests, "steps": steps, "span": span})
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}:{number}: no turn as this version writes it ({error}): {_REMEDY}") from error


def _decode_segment(path: Path, number: int, data: Mapping[str, Any]) -> FinishedSegment:
    try:
        return FinishedSegment(**{**data, "requests": from_columns(LoadRecord, data["requests"])})
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}:{number}: no segment as this version writes it ({error}): {_REMEDY}") from error
