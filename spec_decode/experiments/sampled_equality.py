"""Whether sampled runs keep the target's distribution: each rule that claims it is watched over prompts with new seeds.

Tokens differ from plain's by design, so there is nothing to compare one by one. Arms that claim to be lossless run
again with a `Witness` around their rule, in engines of their own after the timed ones are closed, since reading whole
distributions takes time. They run the prompts until the evidence is clear either way, at most `repetitions` times.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.commands import Component
from dovetail.contracts.errors import DovetailError
from dovetail.spec_decode.experiments.arms import EnginePlan, Setup, Variant, with_rules
from dovetail.spec_decode.experiments.bootstrap import holm
from dovetail.spec_decode.experiments.equality import DECLARED_LOSSY, DraftedTokens, Equality
from dovetail.spec_decode.experiments.judging import LOSSY_BELOW, SIGNIFICANT, Verdict
from dovetail.spec_decode.experiments.martingale import Evidence
from dovetail.spec_decode.experiments.run import Bench, Workload, request_params, request_seeds
from dovetail.spec_decode.experiments.schema import Experiment
from dovetail.spec_decode.experiments.witness import Witness, read_evidence

_READILY = 0.15
"""A rule whose overrated tokens come so much more often than they should is to be found."""
_WITNESS = f"{Witness.__module__}:{Witness.__qualname__}"

Key = tuple[int, Variant]
"""Batch size and variant."""
Runs = Mapping[Key, Evidence | str]
"""What was seen, or why the run failed."""


def watch_rules(
    experiment: Experiment, setup: Setup, workload: Workload, keys: Sequence[Key], on_pass: Callable[[str], None]
) -> Runs:
    """Runs those that draft and claim to be lossless. `on_pass(text)` is called before each pass over the prompts."""
    found: dict[Key, Evidence | str] = {}
    wanted = [key for key in keys if key[1].length is not None and setup.arms[key[1].arm].is_lossless]
    with tempfile.TemporaryDirectory(prefix="dovetail-ab-") as folder:
        for index, plan in enumerate(setup.engines):
            own = [key for key in wanted if key[1] in plan.variants]
            if own:
                path = Path(folder) / f"{index}.f64"
                with Bench(replace(setup, engines=[_watched(plan, path)]), experiment) as bench:
                    found |= {
                        key: _watch(bench, path, workload, key, LOSSY_BELOW / len(wanted), on_pass) for key in own
                    }
    return found


def _watched(plan: EnginePlan, path: Path) -> EnginePlan:
    """The engine with a witness around its rule, which writes to `path`."""
    speculation = plan.resolved.speculation
    assert speculation is not None

    def watched(rule: Component) -> dict[str, Any]:
        return {"name": _WITNESS, "rule": rule.reference, "options": dict(rule.options), "path": str(path)}

    rules = {name: watched(rule) for name, rule in speculation.rules.items()}
    return with_rules(plan, watched(speculation.acceptance), rules)


def _watch(
    bench: Bench, path: Path, workload: Workload, key: Key, alpha: float, on_pass: Callable[[str], None]
) -> Evidence | str:
    """`alpha`: the p-value that counts, before Holm's correction."""
    path.unlink(missing_ok=True)
    experiment, (batch, variant) = bench.experiment, key
    for number in range(experiment.repetitions):
        on_pass(f"batch {batch}, watching the rule of {variant.label}, pass {number + 1}")
        for start in range(0, len(workload.prompts), batch):
            # No seed comes twice, nor one of the timed turns: a drafter that remembers answers would know that of an
            # equal request.
            places = range(start, min(start + batch, len(workload.prompts)))
            seeds = request_seeds(experiment.sampling, places, experiment.repetitions + number)
            params = request_params(bench, workload, variant, places, seeds)
            try:
                bench.run(variant, [workload.token_ids[place] for place in places], params)
            except DovetailError as error:
                return str(error)
        evidence = read_evidence(path)
        if evidence.p < alpha / 10 or (evidence.p > SIGNIFICANT and evidence.detectable(alpha) <= _READILY):
            break
    return evidence


def judge_sampled(setup: Setup, keys: Sequence[Key], runs: Runs) -> list[Equality]:
    """One result for each, p-values after Holm's correction over all."""
    seen = {key: run for key, run in runs.items() if isinstance(run, Evidence)}
    adjusted = holm({key: run.p for key, run in seen.items()})
    drafted = {
        key: DraftedTokens(
            run.places, run.came, run.expected, run.excess, adjusted[key], run.detectable(LOSSY_BELOW / len(seen))
        )
        for key, run in seen.items()
    }
    return [_judge(setup, key, runs.get(key), drafted.get(key)) for key in keys]


def _judge(setup: Setup, key: Key, run: Evidence | str | None, drafted: DraftedTokens | None) -> Equality:
    batch, variant = key
    if not setup.arms[variant.arm].is_lossless:
        return Equality.without_prompts(variant, batch, *DECLARED_LOSSY)
    if run is None:
        reason = "it drafts nothing, and sampled tokens of two configs cannot be compared: use temperature 0"
        return Equality.without_prompts(variant, batch, "not shown", reason)
    if isinstance(run, str):
        return Equality.without_prompts(variant, batch, "not shown", f"the run that watches its rule failed: {run}")
    assert drafted is not None
    return replace(Equality.without_prompts(variant, batch, *_verdict(drafted)), drafted_tokens=drafted)


def _verdict(drafted: DraftedTokens) -> tuple[Verdict, str]:
    if not drafted.expected:
        return "not shown", "no token was seen that the drafts overrate"
    times = f"{drafted.came:.0f} times, {drafted.expected:.0f} expected"
    counts = f"tokens that drafts overrate came {times} (adjusted p = {drafted.p:.2g})"
    if drafted.p < LOSSY_BELOW:
        return "LOSSY", f"{counts}: not the target's distribution"
    if drafted.p < SIGNIFICANT:
        return "not shown", f"{counts}: unlikely, and not for certain"
    if drafted.detectable > _READILY:
        return "not shown", f"{counts}: so few would show an excess of {drafted.detectable:.0%} or more"
    return "consistent", counts
