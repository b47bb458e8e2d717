"""What `build_app` refuses. tests/executors/test_ray.py runs replicas."""

from __future__ import annotations

import sys

import pytest

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.plugins.server.ray_serve import build_app


def test_ray_serve_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PluginError, match=r"pip install 'dovetail\[ray-serve\]'"):
        build_app({})


@pytest.mark.parametrize(
    ("option", "instead"),
    [("port=9000", "http_options"), ("data_parallel_size=2", "num_replicas"), ("root_path=/llm", "route_prefix")],
)
def test_settings_that_ray_serve_has_in_place_of_ours_are_refused(option: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"has no effect under Ray Serve: leave it out, and use {instead}"):
        build_app(options=[f"server.{option}"])
