"""Runs an experiment file and makes its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dovetail.commands.progress import Progress
from dovetail.contracts.errors import DovetailError
from dovetail.spec_decode.experiments import provenance
from dovetail.spec_decode.experiments.acceptance import describe_acceptance
from dovetail.spec_decode.experiments.admission import check_admission, check_groups
from dovetail.spec_decode.experiments.arms import Setup, baseline_of, prepare, with_fixed_lengths
from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.conversations import with_later_turns
from dovetail.spec_decode.experiments.cost import describe_grid, describe_steps, fit_models
from dovetail.spec_decode.experiments.datasets import DataSet, load_prompts
from dovetail.spec_decode.experiments.engine_features import try_engine_features
from dovetail.spec_decode.experiments.equality import Equality, compare_equality
from dovetail.spec_decode.experiments.features import try_features
from dovetail.spec_decode.experiments.identity import identity
from dovetail.spec_decode.experiments.journal import Journal, open_journal
from dovetail.spec_decode.experiments.load.open_loop import LoadCourse
from dovetail.spec_decode.experiments.load.plan import plan_load, read_load_trace
from dovetail.spec_decode.experiments.load.results import LoadReport, describe_load
from dovetail.spec_decode.experiments.measuring import Course, Decide, Measured, TimeLimit, measure
from dovetail.spec_decode.experiments.progress import TurnProgress, print_phase
from dovetail.spec_decode.experiments.provenance import sha256_of
from dovetail.spec_decode.experiments.records import by_variant
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.results import ArmStatus
from dovetail.spec_decode.experiments.run import Bench, Workload, read_prompts
from dovetail.spec_decode.experiments.sampled_equality import judge_sampled, watch_rules
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL, Experiment
from dovetail.spec_decode.experiments.spec_bench import score_spec_bench
from dovetail.spec_decode.experiments.speed import PLAIN, VariantKey, compare_speed
from dovetail.spec_decode.experiments.stopping import AlwaysValid, is_decided
from dovetail.spec_decode.experiments.trials import Trial
from dovetail.spec_decode.experiments.warnings import load_warnings, run_warnings


@dataclass(frozen=True)
class Procedure:
    """How an experiment is run; what is measured does not depend on it."""

    journal: Path | None = None
    """Where each turn is kept as it ends; None: nowhere."""
    resume: bool = False
    """Go on with the journal."""
    max_minutes: float | None = None
    """No round begins later; what comes after the turns takes its time."""
    until_decided: bool = False
    """Run each group once, and end when every speed-up in tokens/s is decided (`stopping`)."""


def run_experiment(experiment: Experiment, folder: Path, procedure: Procedure = Procedure(), *, allow: bool) -> Report:
    """Runs an experiment and returns its report. Relative paths are resolved against `folder`.

    Raises `ConfigError` for arms that cannot run or do not differ, and for a journal of something else, before any
    weight is read, and what the engine raises.
    """
    limit = TimeLimit(procedure.max_minutes)
    data = load_prompts(experiment.workload, folder)
    setup = prepare(experiment, folder, allow=allow)
    check_admission(experiment, setup, data)
    baseline = baseline_of(experiment, setup)
    trace = read_load_trace(experiment, folder)
    decide: Decide | None = None
    asked = experiment
    if procedure.until_decided:
        check_groups(data.num_requests, experiment)
        experiment = experiment.model_copy(update={"repetitions": 1, "rerun_disturbed": 0})
        decide = partial(is_decided, comparisons=num_comparisons(setup, experiment), baseline=baseline)
    of = identity(experiment, setup, data, until_decided=procedure.until_decided) | {"trace": sha256_of(trace)}
    with _journal(procedure, of) as journal:
        with Bench(setup, experiment) as bench:
            resident = [psutil.Process().memory_info().rss] * len(bench.engines)
            workload = with_later_turns(bench, read_prompts(data, bench.engines[0], experiment), data.name)
            if procedure.until_decided:
                check_groups(len(workload.prompts), experiment)
            journal.begin(sha256_of([list(ids) for ids in workload.token_ids]))
            points = plan_load(experiment, workload, trace, bench.engines[0].config.model.max_model_len)
            course = Course(bench, workload, journal, decide)
            with TurnProgress(course.num_left()) as progress:
                measure(course, progress.begin, limit)
            load = LoadCourse(bench, workload, points, journal, course.failures)
            load_report = _measure_load(experiment, load, limit, baseline)
            course.failures |= load.failures
            measured = course.measured()
            report = _report(experiment, setup, bench, data, workload, resident, measured)
            warnings = [*report.warnings, *load_warnings(load_report)]
            report = replace(report, load=load_report, warnings=warnings)
        if experiment.compatibility and setup.has_adaptive_lengths:
            report = replace(report, features=_try_with_fixed_lengths(experiment, setup, workload))
        if experiment.sampling.temperature == 0:
            return report
        return replace(report, equality=_watch(asked, setup, workload, measured))


def num_comparisons(setup: Setup, experiment: Experiment) -> int:
    """Speed-ups in tokens/s that are judged: arms at their lengths, at each batch size."""
    variants = [variant for plan in setup.engines for variant in plan.variants]
    return len(experiment.grid.batch_sizes) * sum(variant.arm not in (BASELINE, CONTROL) for variant in variants)


def _journal(procedure: Procedure, of: Mapping[str, Any]) -> AbstractContextManager[Journal]:
    if procedure.journal is None:
        return nullcontext(Journal())
    return open_journal(procedure.journal, of, resume=procedure.resume)


def _measure_load(
    experiment: Experiment, course: LoadCourse, limit: TimeLimit, baseline: VariantKey
) -> LoadReport | None:
    if experiment.load is None:
        return None
    with TurnProgress(course.num_left()) as progress:
        course.measure(progress.begin, limit)
    resampler = Resampler(experiment.seed)
    levels, planned, rates = experiment.load.slo, course.num_planned(), course.rates()
    return describe_load(course.records(), levels, resampler, planned, baseline, rates)


def _report(
    experiment: Experiment,
    setup: Setup,
    bench: Bench,
    data: DataSet,
    workload: Workload,
    resident: Sequence[int],
    measured: Measured,
) -> Report:
    """All but the equality of sampled runs."""
    has_looked = measured.extent.decided is not None
    resampler = AlwaysValid(experiment.seed) if has_looked else Resampler(experiment.seed)
    is_greedy = experiment.sampling.temperature == 0
    print_phase("comparing tokens, and drawing the intervals of speed")
    equality = compare_equality(setup, bench, workload, measured) if is_greedy else []
    acceptance = describe_acceptance(measured.requests)
    compared = compare_speed(measured.requests, resampler, baseline_of(experiment, setup))
    models = fit_models(measured.steps, acceptance)
    described = provenance.describe(experiment, setup, bench, data, workload, resident, measured)
    grid, crossovers = describe_grid(compared.ratios, models if compared.baseline == PLAIN else [])
    return Report(
        provenance=described,
        equality=equality,
        acceptance=acceptance,
        speed=compared.ratios,
        grid=grid,
        crossovers=crossovers,
        cost_models=models,
        steps=describe_steps(measured.steps),
        status=list(_status(setup, bench, measured)),
        features=_try_all(setup, bench, workload)
        if experiment.compatibility and not setup.has_adaptive_lengths
        else [],
        warnings=[
            *([described.noise] if described.noise else []),
            *run_warnings(experiment, setup, workload, measured, acceptance, equality),
        ],
        requests=measured.requests,
        step_samples=measured.steps,
        spans=measured.spans,
        pairs=compared.pairs,
        baseline=compared.baseline,
        spec_bench=score_spec_bench(measured.requests) if data.format == "spec_bench" else [],
    )


def _try_all(setup: Setup, bench: Bench, workload: Workload) -> list[Trial]:
    print_phase("trying each arm with each feature of the engine (compatibility)")
    return [*try_features(setup, bench, workload), *try_engine_features(bench, workload)]


def _try_with_fixed_lengths(experiment: Experiment, setup: Setup, workload: Workload) -> list[Trial]:
    """In engines of its own: a length that adapts drafts nothing on requests as short as these, and nothing would be
    tried. What goes wrong leaves the rest of the report as it is."""
    fixed = with_fixed_lengths(setup)
    try:
        with Bench(fixed, experiment) as bench:
            return _try_all(fixed, bench, workload)
    except DovetailError as error:
        return [Trial(arm, "all", "not tried", f"engines with fixed draft lengths: {error}") for arm in setup.arms]


def _watch(experiment: Experiment, setup: Setup, workload: Workload, measured: Measured) -> list[Equality]:
    """Equality of sampled runs, in engines of its own."""
    print_phase("watching the acceptance rules of sampled arms")
    ran = by_variant(measured.requests)
    variants = [
        (batch, variant)
        for batch in experiment.grid.batch_sizes
        for plan in setup.engines
        for variant in plan.variants
        if variant.arm not in (BASELINE, CONTROL) and (batch, variant.arm, variant.length) in ran
    ]
    with Progress(experiment.repetitions * len(variants)) as progress:

        def on_pass(what: str) -> None:
            progress.show(what)
            progress.advance()

        return judge_sampled(setup, variants, watch_rules(experiment, setup, workload, variants, on_pass))


def _status(setup: Setup, bench: Bench, measured: Measured) -> Iterator[ArmStatus]:
    errors: dict[tuple[str, int | None], str] = {}
    for record in measured.requests:
        if record.drafter_error is not None:
            errors.setdefault((record.arm, record.length), f"went on without its drafter: {record.drafter_error}")
    for variant in bench.variants:
        if variant.arm == CONTROL:
            continue
        failure = measured.failures.get(variant)
        reason = failure or errors.get((variant.arm, variant.length), "")
        yield ArmStatus(variant.arm, variant.length, failure is None, reason)
    for arm, reason in setup.refused.items():
        yield ArmStatus(arm, None, False, reason)
