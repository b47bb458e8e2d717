"""What the section `server` resolves to: the routes and the router that the config names, and everything else as it
is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import Component
from dovetail.config.schema import ServerSection
from dovetail.engine.resolving.choose import choose
from dovetail.engine.resolving.router import choose_router
from dovetail.engine.resolving.rules import create_resolution
from dovetail.engine.resolving.slots import ROUTE
from dovetail.registry.registry import Registry
from dovetail.worker.machine.environment import detect_environment

_DEVICE = "cpu"
"""Routes run in processes that never import torch."""


@dataclass(frozen=True)
class ResolvedServer:
    """A server with every choice made. It pickles."""

    section: Mapping[str, Any] = field(repr=False)
    """The section as plain data, its API keys in the clear; paths in it are absolute."""
    routes: Mapping[str, Component]
    """By label."""
    router: Component | None = None
    """Which replica takes a request; None where there is one."""


def resolve_server(layered: LayeredConfig, registry: Registry | None = None) -> ResolvedServer:
    """Chooses the routes; a config without the section has its defaults.

    Raises `ConfigError` for what is refused, `PluginError` for a route that cannot be loaded.
    """
    section = layered.config.server or ServerSection()
    config = layered.config.model_copy(update={"server": section})
    state = create_resolution(replace(layered, config=config), registry, detect_environment(_DEVICE))
    labels = [label for label, route in section.routes.items() if route is not None]
    routes = {label: choose(state, ROUTE.at(label), None).component for label in labels}
    return ResolvedServer(_plain(section, layered), routes, choose_router(state))


def _plain(section: ServerSection, layered: LayeredConfig) -> dict[str, Any]:
    plain = section.model_dump(mode="json")
    plain["api_keys"] = [key.get_secret_value() for key in section.api_keys]
    if section.uds is not None:
        plain["uds"] = str(layered.base_dir("server.uds") / section.uds)
    if section.tls is not None:
        for name in ("certfile", "keyfile", "ca_certs"):
            if plain["tls"][name] is not None:
                plain["tls"][name] = str(layered.base_dir(f"server.tls.{name}") / plain["tls"][name])
    return plain
