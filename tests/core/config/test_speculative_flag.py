"""`--speculative NAME`: a drafter of the config, a draft worker, or none."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.config.schema import SpeculativeSection
from dovetail.contracts.errors import ConfigError

TWO = {"speculative": {"drafters": {"near": "ngram", "far": {"name": "ngram", "num_tokens": 9}}, "default": "near"}}


def section(config: Any, name: str, **more: Any) -> SpeculativeSection | None:
    return load_config(config, speculative=name, **more).config.speculative


def test_a_drafter_of_the_config_becomes_the_default():
    found = section(TWO, "far")
    assert found is not None
    assert found.default == "far"
    assert set(found.drafters) == {"near", "far"}


def test_another_name_is_a_draft_worker_beside_those_of_the_config():
    found = section(TWO, "suffix")
    assert found is not None
    assert found.default == "draft"
    assert found.drafters["draft"].name == "suffix"
    assert set(found.drafters) == {"near", "far", "draft"}


def test_it_goes_with_the_flags_and_overrides_that_speak_of_the_same_drafter():
    more = {"flags": {"num_speculative_tokens": 7}, "overrides": ["speculative.drafters.draft.tree=true"]}
    found = section(None, "suffix", **more)
    assert found is not None
    assert found.drafters["draft"].num_tokens == 7
    assert found.drafters["draft"].options == {"tree": True}


def test_off_leaves_requests_without_a_drafter():
    found = section(TWO, "off")
    assert found is not None
    assert found.default is None
    assert section(None, "off") is None


def test_it_is_told_where_a_value_came_from():
    layered = load_config(TWO, speculative="far")
    assert layered.origin("speculative.default") == "--speculative"


def test_two_flags_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="given twice"):
        section(None, "suffix", flags={"speculative_model": "[ngram]"})
