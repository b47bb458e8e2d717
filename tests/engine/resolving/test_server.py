"""The section `server`: what it resolves to, and that its secrets are shown nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.commands import load_config, resolve_server
from dovetail.config.manifest import manifest
from dovetail.config.schema import ServerSection
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.engine.explanation import as_data, explain
from dovetail.plugins.routes import DEFAULT_ROUTES
from dovetail.plugins.server.settings import ServerSettings, TLSSettings, server_settings
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

ROUTE = """
from fastapi import APIRouter
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route

class Options(PluginOptions):
    word: str = "hi"

class Mine(Route):
    contract = (1, 0)
    Options = Options

    def router(self):
        return APIRouter()
"""


def test_without_a_section_all_is_default() -> None:
    resolved = resolve_server(load_config({"model": "any"}))
    assert tuple(resolved.routes) == DEFAULT_ROUTES
    assert server_settings(resolved.section) == ServerSettings()


def test_routes_are_added_and_switched_off(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ROUTE)
    routes = {"metrics": None, "tokenize": {"name": "health"}, "own": {"name": "./mine.py:Mine", "word": "yes"}}
    layered = load_config({"model": "any", "server": {"routes": routes}}, base_dir=tmp_path)
    resolved = resolve_server(layered)
    names = {label: component.name for label, component in resolved.routes.items()}
    own = names.pop("own")
    assert own.endswith("mine.py:Mine")
    assert resolved.routes["own"].options == {"word": "yes"}
    expected = {name: name for name in DEFAULT_ROUTES if name != "metrics"}
    assert names == {**expected, "tokenize": "health"}


def test_a_label_alone_names_its_plugin() -> None:
    layered = load_config({"model": "any", "server": {"routes": {"health": {}}}})
    assert resolve_server(layered).routes["health"].name == "health"


@pytest.mark.parametrize(("caching", "expected"), [(True, "prefix_aware"), (False, "least_tokens")])
def test_auto_follows_the_blocks_of_prefix_caches_that_are_there(tmp_path: Path, caching: bool, expected: str) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    config = {"model": {"path": str(tmp_path), "tokenizer_mode": "none"}, "cache": {"prefix_caching": caching}}
    layered = load_config({**config, "server": {"data_parallel_size": 2}})
    router = resolve_server(layered).router
    assert router is not None
    assert router.name == expected
    # Explain says the same, and what it depends on.
    decision = next(one for one in explain(layered).decisions if one.key == "server.router.name")
    assert decision.got == expected
    assert "cache.prefix_caching" in f"{decision.reason} {decision.candidates}"
    assert resolve_server(load_config(config)).router is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"routes": {"own": "helth"}}, "Did you mean 'health'"),
        ({"routes": {"own": {"name": "health", "size": 3}}}, "size"),
    ],
)
def test_routes_that_cannot_be_had_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        resolve_server(load_config({"model": "any", "server": section}))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"prot": 80}, "did you mean 'port'"),
        ({"port": 70000}, "server.port"),
        ({"root_path": "llm"}, "server.root_path"),
        ({"root_path": "/llm/"}, "server.root_path"),
        ({"max_body_mib": 0}, "server.max_body_mib"),
        ({"log_level": "loud"}, "server.log_level"),
        ({"tls": {"keyfile": "k"}}, "server.tls.certfile"),
        ({"restart": {"policy": "always"}}, "server.restart.policy"),
        ({"api_keys": [""]}, "a key is empty"),
        ({"api_keys": ["**********"]}, "give the keys again"),
        ({"cors": {"origins": ["*"]}}, "allow_origins"),
    ],
)
def test_bad_values_are_refused_by_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"model": "any", "server": section})


def test_files_count_from_the_folder_of_the_config(tmp_path: Path) -> None:
    section = {"uds": "s", "tls": {"certfile": "c.pem", "keyfile": "/k.pem"}, "cors": {"allow_origins": ["*"]}}
    settings = server_settings(
        resolve_server(load_config({"model": "any", "server": section}, base_dir=tmp_path)).section
    )
    assert settings.uds == str(tmp_path / "s")
    assert settings.tls == TLSSettings(certfile=str(tmp_path / "c.pem"), keyfile="/k.pem")
    assert settings.cors.allow_origins == ("*",)


def test_one_name_or_key_needs_no_list() -> None:
    section = ServerSection.model_validate({"served_model_name": "a", "api_keys": "k"})
    assert (section.served_model_name, section.api_keys[0].get_secret_value()) == (["a"], "k")


def test_keys_are_shown_nowhere(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    model = {"path": str(tmp_path), "tokenizer_mode": "none"}
    config = {"model": model, "server": {"api_keys": ["hush-1"]}}
    layered = load_config(config, overrides=["server.api_keys=[hush-2]"])
    explanation = explain(layered)
    assert explanation.resolved is not None
    shown = [as_data(explanation), manifest(explanation.resolved), layered.tree(), layered.config, explanation]
    assert "hush" not in repr([*shown, resolve_server(layered)])
    assert resolve_server(layered).section["api_keys"] == ["hush-2"]


def test_refusals_do_not_show_keys() -> None:
    with pytest.raises(ConfigError, match="keep one") as twice:
        load_config({"model": "any"}, overrides=["server.api_keys=[hush-1]", "server.api_keys=[hush-2]"])
    with pytest.raises(ConfigError, match=r"server\.api_keys") as wrong:
        load_config({"model": "any", "server": {"api_keys": {"hush": 1}}})
    assert "hush" not in str(twice.value) + str(wrong.value)


def test_resolving_a_server_imports_no_torch() -> None:
    code = (
        "import sys; from dovetail.commands import load_config, resolve_server\n"
        "resolve_server(load_config({'model': 'any'})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
