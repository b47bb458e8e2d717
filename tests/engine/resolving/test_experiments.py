"""Experiments on live traffic that a config cannot have, and what the others resolve to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving import resolve
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

OFF, LOOKUP = {"speculation": "off"}, {"speculation": "lookup"}
ARMS = {"plain": OFF, "lookup": LOOKUP}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, tiny_config("llama"))
    return directory


def resolved(model: Path, experiments: Any, **sections: Any) -> ResolvedConfig:
    config = {
        "model": {"path": str(model), "tokenizer_mode": "none"},
        "speculative": {"drafters": {"lookup": {"name": "ngram"}}, "default": None},
        "telemetry": ["prometheus"],
        "experiments": experiments,
        **sections,
    }
    return resolve(load_config(config))


def test_shares_are_parts_of_one(model: Path) -> None:
    arms = {"configured": {}, "plain": OFF, "lookup": {**LOOKUP, "share": 2}}
    (found,) = resolved(model, {"drafts": {"arms": arms, "traffic": 0.5}}).experiments
    assert [(arm.name, arm.share, arm.drafter) for arm in found.arms] == [
        ("configured", 0.25, None),
        ("plain", 0.25, None),
        ("lookup", 0.5, "lookup"),
    ]
    assert (found.unit, found.slice_s, found.traffic, found.seed) == ("slice", 60.0, 0.5, 0)


def test_a_file_may_write_off_without_quotes(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        f"model: {{path: {model}, tokenizer_mode: none}}\n"
        "speculative: {drafters: {lookup: {name: ngram}}}\n"
        "telemetry: [prometheus]\n"
        "experiments: {drafts: {arms: {plain: {speculation: off}, lookup: {speculation: lookup}}}}\n"
    )
    (found,) = resolve(load_config(file)).experiments
    assert [arm.drafter for arm in found.arms] == [None, "lookup"]


@pytest.mark.parametrize(
    ("experiments", "message"),
    [
        (
            {"a": {"arms": {"plain": OFF, "lookup": {"speculation": "lookpu"}}}},
            r"experiments\.a\.arms\.lookup\.speculation 'lookpu' \(config mapping\) is no drafter .*mean 'lookup'",
        ),
        ({"a": {"arms": {"plain": OFF}}}, r"experiments\.a\.arms: .*at least 2 items"),
        ({"a": {"arms": {**ARMS, "lookup": {**LOOKUP, "share": 0}}}}, r"arms\.lookup\.share: .*greater than 0, got 0"),
        ({"a": {"arms": ARMS, "unit": "token"}}, r"experiments\.a\.unit: .*'request', 'user' or 'slice', got 'token'"),
        ({"a": {"arms": ARMS, "trafic": 1}}, r"unknown key 'experiments\.a\.trafic' .*did you mean 'traffic'"),
        ({"a": {"arms": {**ARMS, "x": {"drafter": "lookup"}}}}, r"unknown key 'experiments\.a\.arms\.x\.drafter'"),
        ({"a": {"arms": ARMS}, "b": {"arms": ARMS}}, r"experiments a, b overlap: they take 2 of the traffic"),
        (
            {"a": {"arms": ARMS, "traffic": 0.5}, "b": {"arms": ARMS, "traffic": 0.5, "unit": "user"}},
            r"experiments\.a and experiments\.b overlap: unit is 'slice' \(default\) and 'user' \(config mapping\)",
        ),
    ],
)
def test_what_cannot_be_is_refused(model: Path, experiments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(model, experiments)


def test_a_drafter_needs_the_section_that_loads_it(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 'lookup' .*no section `speculative`: add it with this drafter"):
        resolved(model, {"a": {"arms": ARMS}}, speculative=None)


def test_experiments_that_nobody_counts_are_warned_of(model: Path) -> None:
    experiments = {"a": {"arms": ARMS}}
    assert any("nobody counts them" in warning for warning in resolved(model, experiments, telemetry=[]).warnings)
    assert not any("nobody counts them" in warning for warning in resolved(model, experiments).warnings)
