"""What is told of one request: to telemetry sinks when it ends, and to whoever asks, also some time after its end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace

from dovetail.contracts.engine_client import RequestReport, RequestReports
from dovetail.contracts.telemetry import GrammarStats, RequestStats
from dovetail.engine.request_table import RequestEntry

_ERROR_CLASS = re.compile(r"[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit)(?=:)")
"""Errors of steps are reported as "ValueError: message"."""


class EndedRequests:
    """The requests that ended last, as many as are kept. The engine's thread adds; any thread may look."""

    def __init__(self) -> None:
        self.most = 0
        """How many are kept; 0: none."""
        self._stats: dict[str, RequestStats] = {}

    def add(self, stats: RequestStats) -> None:
        """One more ended; that of the same id before it is forgotten."""
        self._stats.pop(stats.request_id, None)
        # Clients' headers may be long, and tell nothing of what was done.
        self._stats[stats.request_id] = replace(stats, trace_context={}) if stats.trace_context else stats
        while len(self._stats) > self.most:
            del self._stats[next(iter(self._stats))]

    def find(self, request_id: str) -> list[RequestReport]:
        """Those of this id, or whose id goes on behind it with a hyphen; in the order in which they ended."""
        known = list(self._stats.values())  # one call, so no step changes it meanwhile
        return [
            RequestReport(state="finished", stats=stats) for stats in known if is_part_of(stats.request_id, request_id)
        ]


def is_part_of(request_id: str, asked: str) -> bool:
    """Whether an id is the one asked for, or goes on behind it with a hyphen."""
    return request_id.startswith(asked) and request_id[len(asked) : len(asked) + 1] in ("", "-")


def live_report(entry: RequestEntry) -> RequestReport:
    """Of a request that has not finished, from any thread: the counts are those of the step before, or of the one that
    runs."""
    stats = request_stats(entry)
    return RequestReport(state=_state(entry), stats=stats)


def reports_of(request_id: str, entries: Iterable[RequestEntry], ended: EndedRequests) -> RequestReports:
    """What is known of a request and its parts: of those that run, `entries`, and those that ended."""
    live = [live_report(entry) for entry in entries if is_part_of(entry.request_id, request_id)]
    found = ended.find(request_id)
    ids = {report.stats.request_id for report in found}  # some may have ended since the line before
    running = [report for report in live if report.stats.request_id not in ids and report.state != "finished"]
    return RequestReports(requests=(*running, *found), num_kept=ended.most)


def _state(entry: RequestEntry) -> str:
    first = next((sequence for sequence in entry.sequences if not sequence.is_finished), None)
    if first is None:
        return "finished"
    if entry.grammar_wait is not None and entry.grammar_wait.until is None:
        return "compiling"
    if first.waits_for_adapter:
        return "loading"
    return "held" if first.is_held else first.status.value


def request_stats(entry: RequestEntry) -> RequestStats:
    """All that is known of a request; of one that has not finished up to now."""
    metrics, params = entry.metrics, entry.params
    is_finished = metrics.finished_time is not None
    open_ = [] if is_finished else [sequence for sequence in entry.sequences if not sequence.is_finished]
    return RequestStats(
        request_id=entry.request_id,
        arrival_time=metrics.arrival_time,
        first_scheduled_time=metrics.first_scheduled_time,
        first_token_time=metrics.first_token_time,
        finish_time=time.monotonic() if metrics.finished_time is None else metrics.finished_time,
        finish_reason=_finish_reason(entry) if is_finished else "",
        num_prompt_tokens=entry.num_prompt_tokens,
        num_cached_tokens=metrics.num_cached_tokens if is_finished else entry.sequences[0].num_cached_tokens,
        num_generated_tokens=metrics.num_generated_tokens + sum(sequence.num_output_tokens for sequence in open_),
        num_preemptions=metrics.num_preemptions + sum(sequence.num_preemptions for sequence in open_),
        drafter=metrics.drafter,
        num_draft_rounds=metrics.num_draft_rounds,
        num_drafted=metrics.num_drafted,
        num_accepted=metrics.num_accepted,
        drafted_per_position=tuple(metrics.drafted_per_position),
        accepted_per_position=tuple(metrics.accepted_per_position),
        drafter_error=metrics.drafter_error,
        speculation=params.speculation,
        drafter_is_idle=entry.drafter_is_idle,
        adapter=entry.adapter,
        weight_version=entry.weight_version,
        n=params.n,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        priority=entry.sequences[0].priority,
        is_salted=entry.cache_salt is not None,
        has_prompt_logprobs=params.prompt_logprobs is not None,
        grammar=_grammar_stats(entry),
        error_type=_error_type(entry.error) if entry.error is not None else None,
        trace_context=entry.trace_context,
        assignment=entry.assignment,
    )


def _finish_reason(entry: RequestEntry) -> str:
    return "error" if entry.error is not None else entry.finish_reason


def _grammar_stats(entry: RequestEntry) -> GrammarStats | None:
    wait, grammar = entry.grammar_wait, entry.sequences[0].grammar
    if wait is None or grammar is None:
        return None
    seconds = None if wait.until is None else wait.until - wait.since
    return GrammarStats(
        form=grammar.spec.form, was_compiled=wait.was_compiled, wait=seconds, is_refused=wait.is_refused
    )


def _error_type(error: str) -> str:
    found = _ERROR_CLASS.match(error)
    return found.group() if found else "_OTHER"
