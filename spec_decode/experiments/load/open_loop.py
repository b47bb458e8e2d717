"""Sends an open-loop load to the engines: each request at its time, whether earlier ones have finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.contracts.errors import DovetailError
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.journal import Journal
from dovetail.spec_decode.experiments.load.plan import Arrival, LoadPoint
from dovetail.spec_decode.experiments.load.records import FinishedSegment, LoadKey, LoadRecord
from dovetail.spec_decode.experiments.measuring import OnTurn, TimeLimit, failure_of
from dovetail.spec_decode.experiments.plan import Turn, make_turns
from dovetail.spec_decode.experiments.run import Bench, Workload, request_params, request_seeds
from dovetail.spec_decode.experiments.serving import Finished


class LoadCourse:
    """The segments of an experiment's load: what is planned, and what has finished."""

    def __init__(
        self,
        bench: Bench,
        workload: Workload,
        points: Sequence[LoadPoint],
        journal: Journal,
        failures: Mapping[Variant, str],
    ):
        self._bench = bench
        self._workload = workload
        self._points = points
        self._journal = journal
        self.failures = dict(failures)
        """Arms that run no more."""
        for one in journal.segments.values():
            if one.failure is not None:
                named = [v for v in bench.variants if (v.arm, v.length) == (one.arm, one.length)]
                self.failures |= dict.fromkeys(named, one.failure)

    def num_left(self) -> int:
        """Segments to run."""
        return sum(not self._is_done(point, turn) for point in self._points for turn in self._turns(point))

    def num_planned(self) -> int:
        """All segments, those of arms that failed left out."""
        return sum(turn.what not in self.failures for point in self._points for turn in self._turns(point))

    def rates(self) -> dict[LoadKey, float]:
        """Requests per second of every variant and point, those of arms that failed left out."""
        running = [variant for variant in self._bench.variants if variant not in self.failures]
        return {(point.name, own.arm, own.length): point.rate for point in self._points for own in running}

    def _turns(self, point: LoadPoint) -> list[Turn[Variant]]:
        experiment = self._bench.experiment
        groups = [tuple(arrival.place for arrival in segment) for segment in point.segments]
        seed = experiment.seed + 7919 * (1 + self._points.index(point))
        return make_turns(self._bench.variants, groups, experiment.repetitions, experiment.order, seed)

    def _is_done(self, point: LoadPoint, turn: Turn[Variant]) -> bool:
        key = (point.name, turn.repetition, turn.group, turn.what.arm, turn.what.length)
        return turn.what in self.failures or key in self._journal.segments

    def measure(self, on_turn: OnTurn, limit: TimeLimit) -> None:
        """Runs what is missing, until the limit; a segment in all arms or in none."""
        for point in self._points:
            round_ = (-1, -1)
            for turn in self._turns(point):
                if (turn.repetition, turn.group) != round_:
                    if limit.is_passed():
                        return
                    if turn.repetition != round_[0]:
                        self._bench.forget_finished()
                    round_ = (turn.repetition, turn.group)
                if not self._is_done(point, turn):
                    on_turn(f"{point.name}, repetition {turn.repetition + 1}, {turn.what.label}")
                    self._journal.append_segment(self._run(point, turn))

    def _run(self, point: LoadPoint, turn: Turn[Variant]) -> FinishedSegment:
        variant = turn.what
        place = (point.name, turn.repetition, turn.group, variant.arm, variant.length)
        arrivals = point.segments[turn.group]
        try:
            found = self._serve(variant, turn, arrivals)
        except DovetailError as error:
            self.failures[variant] = failure_of(variant, error, self._bench.experiment)
            return FinishedSegment(*place, failure=str(error))
        return FinishedSegment(
            *place, [self._record(point, turn, one, own) for one, own in zip(arrivals, found, strict=True)]
        )

    def _serve(self, variant: Variant, turn: Turn[Variant], arrivals: Sequence[Arrival]) -> list[Finished]:
        seeds = request_seeds(self._bench.experiment.sampling, turn.prompts, turn.repetition)
        given = request_params(self._bench, self._workload, variant, [arrival.place for arrival in arrivals], seeds)
        params = [
            own if arrival.max_tokens is None else replace(own, max_tokens=arrival.max_tokens, ignore_eos=True)
            for arrival, own in zip(arrivals, given, strict=True)
        ]
        prompts, times = [arrival.token_ids for arrival in arrivals], [arrival.time for arrival in arrivals]
        return self._bench.run(variant, prompts, params, arrivals=times)

    def _record(self, point: LoadPoint, turn: Turn[Variant], arrival: Arrival, served: Finished) -> LoadRecord:
        assert served.last is not None
        metrics = served.last.metrics
        scheduled = metrics.first_scheduled_time
        return LoadRecord(
            point=point.name,
            rate=point.rate,
            arm=turn.what.arm,
            length=turn.what.length,
            repetition=turn.repetition,
            segment=turn.group,
            prompt=self._workload.prompts[arrival.place].index,
            arrival=arrival.time,
            queued=0.0 if scheduled is None else max(0.0, scheduled - metrics.arrival_time),
            ttft=served.times[0] - arrival.time,
            e2e=served.times[-1] - arrival.time,
            tokens=len(served.token_ids),
            drafted=metrics.num_drafted,
            accepted=metrics.num_accepted,
            drafter_error=metrics.drafter_error,
        )

    def records(self) -> list[LoadRecord]:
        """Of all segments that have finished, in earlier sessions too; arms that failed are left out."""
        failed = {(variant.arm, variant.length) for variant in self.failures}
        return [
            record
            for one in self._journal.segments.values()
            if (one.arm, one.length) not in failed
            for record in one.requests
        ]
