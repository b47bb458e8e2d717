"""A saved report, compared anew with another arm: nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.headline import Headline, make_headline
from dovetail.spec_decode.experiments.records import RequestRecord, by_variant, label_among
from dovetail.spec_decode.experiments.saved_report import SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import Compared, VariantKey, compare_speed, variant_named
from dovetail.spec_decode.experiments.stopping import AlwaysValid

Label = Callable[[str, int | None], str]


def baseline_among(saved: SavedReport, records: Sequence[RequestRecord], name: str | None) -> VariantKey:
    """The variant of this name among a report's records; None: the baseline of its experiment. Raises `ConfigError` for
    a name of no arm."""
    arms = saved.provenance.arms
    ran = {(arm, length): label_among(arms, arm, length) for _, arm, length in by_variant(records) if arm != CONTROL}
    return variant_named(name or saved.provenance.experiment.get("baseline", BASELINE), ran)


def compare_anew(saved: SavedReport, baseline: str | None) -> tuple[Compared, Headline, Label]:
    """All ratios to `baseline` (None: that of the experiment), their verdicts, and what arms are called.

    Where the run ended by what it saw, intervals are those that hold for that. Raises `ConfigError` for a baseline that
    is no arm of the report.
    """
    records, seed = saved.records(), saved.provenance.experiment.get("seed", 0)

    def label(arm: str, length: int | None) -> str:
        return label_among(saved.provenance.arms, arm, length)

    wanted = baseline_among(saved, records, baseline)
    compared = compare_speed(records, AlwaysValid(seed) if saved.ended_by_itself else Resampler(seed), wanted)
    equality = {(own.arm, own.length, own.batch): own.verdict for own in saved.equality}
    return compared, make_headline(compared, equality, label), label
