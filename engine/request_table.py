"""The requests of one engine as the step loop sees them: sequences, counts and times, no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dovetail.contracts.outputs import RequestMetrics, SpeculationTotals
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import RequestStatus
from dovetail.contracts.step import DraftCounts
from dovetail.contracts.telemetry import Assignment
from dovetail.engine.pending_grammars import GrammarWait
from dovetail.engine.sequence import Sequence
from dovetail.engine.step import Ending, Step
from dovetail.engine.step_update import SequenceEnd, StepUpdate, TextStop


@dataclass(slots=True)
class RequestEntry:
    """One request, from its acceptance to its end."""

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    weight_version: int
    """Of the weights when it came."""
    weight_checksum: str
    sequences: list[Sequence]
    """One for each completion; in order."""
    metrics: RequestMetrics
    num_open: int
    """Sequences that have not ended."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """W3C Trace Context: "traceparent" and "tracestate", where they were given."""
    cache_salt: str | None = None
    """Only requests with the same one share cached prefixes; None: it came without."""
    drafter_is_idle: bool = False
    """It goes without the drafter that it would have, since that has not paid for long."""
    grammar_wait: GrammarWait | None = None
    """None: the request asks for no form of its output."""
    assignment: Assignment | None = None
    """What it got, where it takes part in an experiment."""
    adapter: str = ""
    """Name of the adapter that is added to the weights; "" for none."""
    finish_reason: str = "abort"
    """Of the first sequence, once it has ended."""
    error: str | None = None
    """Why the first of its sequences that failed did so."""


class Telemetry(Protocol):
    """What measures requests."""

    def first_token(self, entry: RequestEntry, now: float) -> None:
        """A request got its first token."""

    def request_finished(self, entry: RequestEntry) -> None:
        """All sequences of a request have ended."""


class RequestTable:
    """Makes a `StepUpdate` of each step, and keeps the counts of each request."""

    def __init__(self, telemetry: Telemetry):
        self._telemetry = telemetry
        self._entries: dict[str, RequestEntry] = {}
        self._by_seq_id: dict[int, RequestEntry] = {}
        self._streaming: set[int] = set()
        """seq_ids of sequences whose tokens are reported after every step."""
        self._unreported_spans: dict[int, list[tuple[int, int]]] = {}
        """By seq_id, of sequences that do not stream, until they end."""
        self._totals: dict[str, SpeculationTotals] = {}
        self._by_arm: Counter[tuple[str, str]] = Counter()
        """Requests by experiment and arm, of those that take part in one."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def request_ids(self) -> list[str]:
        """Requests that are not finished, in order of arrival."""
        return list(self._entries)

    def entries(self) -> list[RequestEntry]:
        """Requests that are not finished, in order of arrival. From any thread."""
        return list(self._entries.values())

    def adapters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the adapters of requests in the batch, and of those that wait. From any thread."""
        running: set[str] = set()
        waiting: set[str] = set()
        for entry in self.entries():
            if entry.adapter:
                is_running = any(sequence.status is RequestStatus.RUNNING for sequence in entry.sequences)
                (running if is_running else waiting).add(entry.adapter)
        return tuple(sorted(running)), tuple(sorted(waiting))

    def add(self, entry: RequestEntry, *, streams: bool) -> None:
        """Takes in an accepted request. `streams`: its tokens are wanted after every step."""
        self._entries[entry.request_id] = entry
        if entry.assignment is not None:
            self._by_arm[_arm(entry.assignment)] += 1
        for sequence in entry.sequences:
            self._by_seq_id[sequence.seq_id] = entry
            if streams:
                self._streaming.add(sequence.seq_id)

    def drop(self, request_id: str) -> None:
        """Forgets a request that was not queued after all."""
        entry = self._entries[request_id]
        self._remove(entry)
        for sequence in entry.sequences:
            self._forget(sequence.seq_id)

    def sequences(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended."""
        entry = self._entries.get(request_id)
        return [s for s in entry.sequences if s.seq_id in self._by_seq_id] if entry is not None else []

    def sequence(self, seq_id: int) -> Sequence | None:
        """The sequence of this id; None where it has ended."""
        entry = self._by_seq_id.get(seq_id)
        return None if entry is None else next(s for s in entry.sequences if s.seq_id == seq_id)

    def num_others(self, experiment: str, arm: str) -> int:
        """How many requests are not of this arm of this experiment."""
        return len(self._entries) - self._by_arm[experiment, arm]

    def speculation_totals(self) -> dict[str, SpeculationTotals]:
        """By drafter, a copy of what was counted so far."""
        return {
            name: replace(
                totals,
                drafted_per_position=totals.drafted_per_position[:],
                accepted_per_position=totals.accepted_per_position[:],
            )
            for name, totals in list(self._totals.items())  # a copy: a step may add one meanwhile
        }

    def add_step(self, step: Step, update: StepUpdate) -> None:
        """Adds to `update` what the step brought."""
        self._take_notes(step, update)
        if step.accepted_spans is not None:
            self._report_accepted(step.accepted_spans, update)
        if self._streaming:
            self._report_tokens(step, update)
        for sequence, ending in step.endings:
            self._end(sequence, ending, step.ended, update)

    def end(self, request_id: str, ending: Ending, now: float, update: StepUpdate) -> None:
        """Ends what is left of a request from outside (abort, failure)."""
        for sequence in self.sequences(request_id):
            self._end(sequence, ending, now, update)

    def stop(self, stop: TextStop, now: float, update: StepUpdate) -> Sequence | None:
        """Ends a sequence whose text has a stop string; the sequence, or None where it has ended already."""
        sequence = self.sequence(stop.seq_id)
        if sequence is not None:
            self._end(sequence, Ending("stop", stop.stop), now, update, stop.num_output_tokens)
        return sequence

    def _take_notes(self, step: Step, update: StepUpdate) -> None:
        """Times, counts and log probabilities of the step; usually there are none to take."""
        result = step.result
        for sequence in step.first_tokens:
            entry = self._by_seq_id[sequence.seq_id]
            if entry.metrics.first_token_time is None:
                entry.metrics.first_token_time = step.ended
                entry.metrics.num_cached_tokens = sequence.num_cached_tokens
                update.metrics[entry.request_id] = entry.metrics
                self._telemetry.first_token(entry, step.ended)
        for sequence in step.entered:
            metrics = self._by_seq_id[sequence.seq_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = step.started
        if not (result.logprobs or result.prompt_logprobs or result.draft_counts or result.drafter_errors):
            return
        requests = step.schedule.requests
        for index, logprobs in result.logprobs.items():
            update.logprobs[requests[index].seq_id] = logprobs
        for index, entries in result.prompt_logprobs.items():
            update.prompt_logprobs[self._by_seq_id[requests[index].seq_id].request_id] = entries
        for index, counts in result.draft_counts.items():
            metrics = self._by_seq_id[requests[index].seq_id].metrics
            _count_drafts(metrics, counts)
            if counts.from_prediction:
                metrics.num_drafted_from_prediction += counts.drafted
                metrics.num_accepted_from_prediction += counts.accepted
            _count_drafts(self._totals.setdefault(counts.drafter, SpeculationTotals()), counts)
        for index, message in result.drafter_errors.items():
            metrics = self._by_seq_id[requests[index].seq_id].metrics
            metrics.drafter_error = message
            if metrics.drafter is not None:
                self._totals.setdefault(metrics.drafter, SpeculationTotals()).num_drafter_errors += 1

    def _report_tokens(self, step: Step, update: StepUpdate) -> None:
        seq_ids, result = step.plan.seq_ids, step.result
        counts = result.counts
        if result.failed and counts is not None:
            counts = [0 if index in result.failed else count for index, count in enumerate(counts)]
        elif result.failed:
            counts = [int(index not in result.failed) for index in range(len(seq_ids))]
        if not result.token_ids:
            return
        if self._streaming.issuperset(seq_ids):
            update.seq_ids, update.token_ids, update.counts = seq_ids, result.token_ids, counts
            return
        start = 0
        update.counts = None if counts is None else []
        for index, seq_id in enumerate(seq_ids):
            count = 1 if counts is None else counts[index]
            if seq_id in self._streaming:
                update.seq_ids.append(seq_id)
                update.token_ids += result.token_ids[start : start + count]
                if update.counts is not None:
                    update.counts.append(count)
            start += count

    def _report_accepted(self, spans: Mapping[int, tuple[int, int]], update: StepUpdate) -> None:
        for seq_id, span in spans.items():
            if seq_id in self._streaming:
                update.accepted_spans[seq_id] = [span]
            else:
                self._unreported_spans.setdefault(seq_id, []).append(span)

    def _end(
        self, sequence: Sequence, ending: Ending, now: float, update: StepUpdate, num_tokens: int | None = None
    ) -> None:
        """`num_tokens`: output tokens that count, where text says so."""
        entry, streams = self._by_seq_id[sequence.seq_id], sequence.seq_id in self._streaming
        if num_tokens is None:
            num_tokens = sequence.num_output_tokens
        update.ends.append(
            SequenceEnd(
                sequence.seq_id,
                ending.finish_reason,
                ending.stop_reason,
                ending.error,
                num_tokens,
                None if streams else sequence.token_ids[sequence.num_prompt_tokens :],
                self._unreported_spans.get(sequence.seq_id, []),
                ending.pooled,
            )
        )
        self._forget(sequence.seq_id)
        metrics = entry.metrics
        metrics.num_generated_tokens += num_tokens
        if sequence.pooling is not None:  # there is no first token at which this would be noted
            metrics.num_cached_tokens = sequence.num_cached_tokens
        metrics.num_preemptions += sequence.num_preemptions
        if sequence is entry.sequences[0]:
            entry.finish_reason = ending.finish_reason
        if entry.error is None:
            entry.error = ending.error
        entry.num_open -= 1
        if entry.num_open == 0:
            metrics.finished_time = now
            # Its own from here on: nothing changes what the last output shows.
            update.metrics[entry.request_id] = entry.metrics = replace(
                metrics,
                drafted_per_position=metrics.drafted_per_position[:],
                accepted_per_position=metrics.accepted_per_position[:],
            )
            # First: another thread that looks for the request finds it among those that run, or those that ended.
            self._telemetry.request_finished(entry)
            self._remove(entry)

    def _remove(self, entry: RequestEntry) -> None:
        del self._entries[entry.request_id]
        if entry.assignment is not None:
            self._by_arm[_arm(entry.assignment)] -= 1

    def _forget(self, seq_id: int) -> None:
        self._by_seq_id.pop(seq_id, None)
        self._streaming.discard(seq_id)
        self._unreported_spans.pop(seq_id, None)


def _arm(assignment: Assignment) -> tuple[str, str]:
    return assignment.experiment, assignment.arm


def _count_drafts(sums: RequestMetrics | SpeculationTotals, counts: DraftCounts) -> None:
    sums.num_draft_rounds += 1
    sums.num_drafted += counts.drafted
    sums.num_accepted += counts.accepted
    _count_positions(sums.drafted_per_position, counts.depth, counts.depth)
    _count_positions(sums.accepted_per_position, counts.accepted, counts.depth)


def _count_positions(rounds: list[int], count: int, depth: int) -> None:
    """Both lists are as long as the deepest draft, so that they can be compared entry by entry."""
    rounds += [0] * (max(count, depth) - len(rounds))
    for position in range(count):
        rounds[position] += 1
