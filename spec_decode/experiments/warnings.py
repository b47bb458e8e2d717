"""What a report warns of: results that do not say what they seem to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dovetail.spec_decode.experiments.acceptance import Acceptance, learned_rates, meetings
from dovetail.spec_decode.experiments.arms import Setup
from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS
from dovetail.spec_decode.experiments.datasets import conversation_of
from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.judging import WIDE_TIE_GAP
from dovetail.spec_decode.experiments.load.results import LoadReport
from dovetail.spec_decode.experiments.measuring import Extent, Measured
from dovetail.spec_decode.experiments.records import RequestRecord, by_prompt, by_variant, label_of
from dovetail.spec_decode.experiments.run import Workload
from dovetail.spec_decode.experiments.schema import Experiment


def run_warnings(
    experiment: Experiment,
    setup: Setup,
    workload: Workload,
    measured: Measured,
    acceptance: Sequence[Acceptance],
    equality: Sequence[Equality],
) -> Iterator[str]:
    """All of a run, those of its machine aside."""
    if experiment.sampling.temperature == 0:
        yield from memory_warnings(measured.requests, setup.label)
    for item in acceptance:
        if item.category is None and item.drafted == 0:
            label = f"{setup.label(item.arm, item.length)}, batch {item.batch}"
            yield f"{label}: nothing was drafted; its speed is that of plain decoding with the drafter's overhead."
    # Turns of one conversation are no independent prompts.
    num_independent = len(set(map(conversation_of, workload.prompts)))
    for batch in experiment.grid.batch_sizes:
        groups = -(-num_independent // batch)
        if groups < MIN_GROUPS:
            yield (
                f"batch {batch}: {num_independent} prompts make {groups} groups, too few for an interval"
                f" (at least {MIN_GROUPS}): give {MIN_GROUPS * batch} prompts or more"
            )
    if not experiment.sampling.ignore_eos and len({len(record.token_ids) for record in measured.requests}) > 1:
        yield (
            "outputs end at their end-of-sequence token: where an arm's tokens diverge, so may its lengths, and its"
            " times (e2e, ITL and tokens/s alike) are of other texts than plain's. sampling.ignore_eos: true makes"
            " lengths equal; what follows a divergence differs all the same."
        )
    yield from tie_warnings(equality)
    yield from extent_warnings(measured.extent)


def tie_warnings(equality: Sequence[Equality]) -> Iterator[str]:
    """Where a tie is so wide that it excuses more than rounding."""
    gap = max((item.tie_gap for item in equality if item.tie_gap is not None), default=0.0)
    if gap > WIDE_TIE_GAP:
        yield (
            f"tie_gap is {gap:.2g}: tokens that differ for the target count as ties, so that a tie excuses nothing by"
            " itself, and equality rests on how often arms diverge compared with the control. More prompts decide that;"
            " reproducibility: strict leaves nothing to excuse."
        )


def extent_warnings(extent: Extent) -> Iterator[str]:
    """Where not everything was measured that was to be."""
    missing = {batch for batch, planned in extent.planned.items() if extent.measured[batch] < planned}
    if missing - set(extent.decided or ()):
        parts = [
            f"{extent.measured[batch]} of {count} turns at batch {batch}" for batch, count in extent.planned.items()
        ]
        yield f"the run was stopped: {', '.join(parts)} were measured. --resume goes on where it ended."
    elif extent.decided is not None and set(extent.planned) != set(extent.decided):
        yield "the prompts are used up, and not every speed-up in tokens/s is decided: give more prompts."


def load_warnings(load: LoadReport | None) -> Iterator[str]:
    """Where segments of the load are missing."""
    if load is not None and load.measured < load.planned:
        yield (
            f"the run was stopped: {load.measured} of {load.planned} segments of the load were measured. --resume goes"
            " on where it ended."
        )


def memory_warnings(
    requests: Sequence[RequestRecord], label_for: Callable[[str, int | None], str] = label_of
) -> Iterator[str]:
    """Which variants met their own answers, of greedy requests; what they gained is not what new prompts would get."""
    first: dict[tuple[str, int | None], tuple[int, list[RequestRecord]]] = {}
    for (batch, arm, length), own in by_variant(requests).items():
        label = f"{label_for(arm, length)}, batch {batch}"
        if (rates := learned_rates(*meetings(own))) is not None:
            yield (
                f"{label}: this drafter remembers finished requests, and met its own answers: acceptance is"
                f" {rates[0]:.3f} where prompts ran first, {rates[1]:.3f} where they ran again. repetitions: 1, and a"
                " number of prompts that the batch size divides, measure what new prompts would get."
            )
        fresh = [records[0] for records in by_prompt(own).values()]
        start, before = first.setdefault((arm, length), (batch, fresh))
        # Of a run that was stopped, batch sizes have other prompts.
        both = {record.prompt for record in before} & {record.prompt for record in fresh}
        pair = [[record for record in own if record.prompt in both] for own in (before, fresh)]
        if batch != start and (rates := learned_rates(*pair)) is not None:
            yield (
                f"{label}: acceptance rises from {rates[0]:.3f} at batch {start} to {rates[1]:.3f} on the same prompts:"
                " this drafter remembers what it was asked to forget (LearnsFromRequests.forget_finished). Give each"
                " batch size an experiment of its own."
            )
