"""Routers that an option names, created as a host creates them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dovetail.commands import create_class
from dovetail.commands.checks import require
from dovetail.commands.installed import Registry
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.router import Router, RouterSetup

Create = Callable[[RouterSetup], Router]


def find_routers(given: Sequence[str]) -> dict[str, Create]:
    """Label -> what creates the router. Raises `ConfigError` for what is no router, `PluginError` for one that cannot
    be loaded."""
    registry = Registry.scan()
    found: dict[str, Create] = {}
    for text in given:
        name, options = _parse(text)
        known = [registry.name_of(entry) for entry in registry.entries("router")]
        is_local = ":" in name or name in known
        require(is_local, f"--router {name}: there is no such router; known: {', '.join(known)}, or ./file.py:Class")
        require(text not in found, f"--router {text} is given twice: leave one out")
        plugin, validated = create_class(registry.component("router", name, options))
        assert issubclass(plugin, Router)
        found[text] = partial(plugin, validated)
    return found


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of NAME or {"name": NAME, ...}."""
    if not text.lstrip().startswith("{"):
        return text, {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--router {text} is not JSON: {error}") from None
    name = options.pop("name", None)
    require(isinstance(name, str), f'--router {text}: give the router as "name"')
    return name, options
