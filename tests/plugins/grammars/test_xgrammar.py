"""The suite of the kind over xgrammar."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("xgrammar")

from dovetail.contracts.grammar import Grammar, GrammarNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.plugins.grammars.xgrammar import XGrammar
from dovetail.testing import grammar_cases as cases
from dovetail.testing.grammar_suite import GrammarSuite


class TestXGrammar(GrammarSuite):
    plugin = XGrammar

    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name == "a large divisor" else pytest.mark.nightly)
            for name in sorted(cases.bombs())
        ],
    )
    def test_explosions_end_in_a_refusal(self, name: str, create: Callable[..., Grammar]) -> None:
        """Most of them take as long as they may."""
        super().test_explosions_end_in_a_refusal(name, create)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    need = GrammarNeed(vocab_size=300, has_tokenizer_json=True)
    environment = Environment(device_type="cpu", num_cpus=1, memory_bytes=2**30)
    assert reasons_against(XGrammar, need, XGrammar.Options(), environment) == []
    monkeypatch.setattr("dovetail.plugins.grammars.xgrammar.find_spec", lambda name: None)
    assert "pip install 'dovetail[xgrammar]'" in reasons_against(XGrammar, need, XGrammar.Options(), environment)[0]


def test_tokenizers_without_json_are_refused() -> None:
    need = GrammarNeed(vocab_size=300, has_tokenizer_json=False)
    environment = Environment(device_type="cpu", num_cpus=1, memory_bytes=2**30)
    assert "tokenizer.json" in reasons_against(XGrammar, need, XGrammar.Options(), environment)[0]
