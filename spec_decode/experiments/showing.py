"""A saved report, compared anew with another arm: nothing runs."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.headline import Headline, make_headline
from dovetail.spec_decode.experiments.records import by_variant, label_among
from dovetail.spec_decode.experiments.saved_report import SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import Compared, compare_speed, variant_named
from dovetail.spec_decode.experiments.stopping import AlwaysValid

Label = Callable[[str, int | None], str]


def compare_anew(saved: SavedReport, baseline: str | None) -> tuple[Compared, Headline, Label]:
    """All ratios to `baseline` (None: that of the experiment), what they come to, and what arms are called.

    Where the run ended by what it saw, intervals are those that hold for that. Raises `ConfigError` for a baseline that
    is no arm of the report.
    """
    experiment, records = saved.provenance.experiment, saved.records()

    def label(arm: str, length: int | None) -> str:
        return label_among(saved.provenance.arms, arm, length)

    ran = {(arm, length): label(arm, length) for _, arm, length in by_variant(records) if arm != CONTROL}
    wanted = variant_named(baseline or experiment.get("baseline", BASELINE), ran)
    seed = experiment.get("seed", 0)
    compared = compare_speed(records, AlwaysValid(seed) if saved.ended_by_itself else Resampler(seed), wanted)
    equality = {(own.arm, own.length, own.batch): own.verdict for own in saved.equality}
    return compared, make_headline(compared, equality, label), label
