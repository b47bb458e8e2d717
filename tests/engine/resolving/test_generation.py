"""`model.generation_config` and its overrides: sampling defaults and end-of-sequence ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving.generation import default_sampling

OWN = {"temperature": 0.5, "top_k": 7, "eos_token_id": [3, 4]}


@pytest.fixture
def resolve_with(
    make_model: Callable[..., Path], resolve_tiny: Callable[..., ResolvedConfig]
) -> Callable[..., ResolvedConfig]:
    def run(**keys: Any) -> ResolvedConfig:
        directory = make_model()
        (directory / "generation_config.json").write_text(json.dumps(OWN))
        return resolve_tiny(model={"path": str(directory), **keys})

    return run


def defaults(resolved: ResolvedConfig) -> dict[str, Any]:
    return default_sampling(resolved.model.hf_config["generation_config"])


def test_auto_is_the_checkpoints(resolve_with: Callable[..., ResolvedConfig]) -> None:
    resolved = resolve_with()
    assert defaults(resolved) == {"temperature": 0.5, "top_k": 7}
    assert resolved.model.eos_token_ids == (3, 4)


def test_none_leaves_the_models_own_end(resolve_with: Callable[..., ResolvedConfig]) -> None:
    resolved = resolve_with(generation_config="none")
    assert defaults(resolved) == {}
    assert resolved.model.eos_token_ids == (2,)


def test_a_directorys_counts(resolve_with: Callable[..., ResolvedConfig], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.25}')
    assert defaults(resolve_with(generation_config=str(tmp_path))) == {"top_p": 0.25}


def test_overrides_go_on_top(resolve_with: Callable[..., ResolvedConfig]) -> None:
    resolved = resolve_with(override_generation_config={"temperature": 0.9, "max_new_tokens": 5, "top_k": None})
    assert defaults(resolved) == {"temperature": 0.9, "max_tokens": 5}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"generation_config": "./absent"}, "there is no generation_config.json in .*absent"),
        ({"override_generation_config": {"temprature": 1}}, "nothing reads a key 'temprature'; did you mean 'temp"),
        ({"override_generation_config": {"temperature": -1}}, "override_generation_config .*temperature must be"),
    ],
)
def test_what_cannot_be_served_is_refused(
    resolve_with: Callable[..., ResolvedConfig], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_with(**keys)
