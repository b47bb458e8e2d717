"""The slot `grammar`: what compiles the grammars of requests, and why nothing does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving import resolve
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model with an end-of-sequence token, and one without, by whether it has one."""
    found = {}
    for has_end in (False, True):
        found[has_end] = tmp_path_factory.mktemp("grammar") / "model"
        save_tiny_model(found[has_end], tiny_config("llama", eos_token_id=5 if has_end else None))
    return found


def resolved(path: Path, mode: str = "auto", **sections: Any) -> ResolvedConfig:
    return resolve(load_config(keywords={"model": {"path": str(path), "tokenizer_mode": mode}, **sections}))


def reason(config: ResolvedConfig) -> str:
    return next(decision.reason for decision in config.decisions if decision.key == "grammar.name")


def test_auto_takes_llguidance_and_the_limits_of_the_section(directories):
    grammar = resolved(directories[True], grammar={"compile_seconds": 3, "compile_gib": 0.5}).grammar
    assert grammar is not None
    assert grammar.component.name == "llguidance"
    assert (grammar.limits.compile_seconds, grammar.limits.compile_bytes) == (3, 2**29)


def test_a_model_without_a_tokenizer_has_no_grammars_and_every_candidate_says_why(directories):
    config = resolved(directories[True], "none")
    assert config.grammar is None
    answers = next(decision.candidates for decision in config.decisions if decision.key == "grammar.name")
    assert all("tokenizer.json" in against[0] for _, against in answers)


def test_a_model_without_an_end_token_has_no_grammars(directories):
    config = resolved(directories[False])
    assert config.grammar is None
    assert "no end-of-sequence token" in reason(config)


@pytest.mark.parametrize(("has_end", "mode"), [(False, "auto"), (True, "none")])
def test_a_named_plugin_is_refused_where_auto_goes_without(directories, has_end, mode):
    with pytest.raises(ConfigError, match=r"grammar\.name.*llguidance"):
        resolved(directories[has_end], mode, grammar="llguidance")


def test_null_asks_nobody(directories):
    config = resolved(directories[True], grammar=None)
    assert config.grammar is None
    assert "grammar" not in config.components_by_path()


def test_other_plugins_are_taken_by_name_with_their_options(directories):
    pytest.importorskip("xgrammar")
    grammar = resolved(directories[True], grammar={"name": "xgrammar", "rehearse_from_bytes": 10}).grammar
    assert grammar is not None
    assert (grammar.component.name, grammar.component.options["rehearse_from_bytes"]) == ("xgrammar", 10)
