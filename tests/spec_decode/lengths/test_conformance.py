from __future__ import annotations

from typing import Any, ClassVar

from dovetail.spec_decode.lengths.adaptive import AdaptiveLength
from dovetail.spec_decode.lengths.confidence import ConfidenceLength
from dovetail.spec_decode.lengths.fixed import FixedLength
from dovetail.testing.draft_length_suite import DraftLengthSuite


class TestAdaptive(DraftLengthSuite):
    plugin = AdaptiveLength


class TestConfidence(DraftLengthSuite):
    plugin = ConfidenceLength


class TestConfidenceOfAllDrafts(DraftLengthSuite):
    plugin = ConfidenceLength
    options: ClassVar[dict[str, Any]] = {"min_confidence": 0.0}


class TestFixed(DraftLengthSuite):
    plugin = FixedLength
