"""The bundled logits processors under their suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.plugins.logits_processors.no_repeat_ngram import NoRepeatNgram
from dovetail.testing.logits_suite import LogitsProcessorSuite


class TestNoRepeatNgram(LogitsProcessorSuite):
    plugin = NoRepeatNgram
    request_options = (None, 2, 1, 3)
    refused_options = (0, "2", True, 2.0)


class TestNoRepeatNgramByConfig(LogitsProcessorSuite):
    plugin = NoRepeatNgram
    options: ClassVar[Mapping[str, Any]] = {"size": 2}
