from __future__ import annotations

from typing import Any, ClassVar

from dovetail.spec_decode.lengths.adaptive import AdaptiveLength
from dovetail.spec_decode.lengths.confidence import ConfidenceLength
from dovetail.spec_decode.lengths.fixed import FixedLength
from dovetail.testing.draft_length_suite import DraftLengthSuite


class TestAdaptive(DraftLengthSuite):
    length_class = AdaptiveLength


class TestConfidence(DraftLengthSuite):
    length_class = ConfidenceLength


class TestConfidenceOfAllDrafts(DraftLengthSuite):
    length_class = ConfidenceLength
    options: ClassVar[dict[str, Any]] = {"min_confidence": 0.0}


class TestFixed(DraftLengthSuite):
    length_class = FixedLength
