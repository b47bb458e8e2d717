"""The suite of the kind over llguidance."""

from __future__ import annotations

from dovetail.plugins.grammars.llguidance import LLGuidanceGrammar
from dovetail.testing.grammar_suite import GrammarSuite


class TestLLGuidance(GrammarSuite):
    plugin = LLGuidanceGrammar
