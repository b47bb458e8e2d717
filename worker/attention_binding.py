"""Gives attention layers their backend and their pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dovetail.config.resolved import Component
from dovetail.contracts.attention import AttentionBackend, AttentionModule, AttentionNeed, AttentionSetup
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.registry.calls import calling

PageView = Callable[[int, KVSpec, AttentionBackend], torch.Tensor]
"""From a layer's index among those that are bound, its cache and the backend to its pages."""


def bind_layers(
    plugins: LoadedPlugins,
    component: Component,
    layers: Sequence[AttentionModule],
    setup: AttentionSetup,
    environment: Environment,
    view: PageView,
    *,
    whose: str,
) -> AttentionBackend:
    """Creates the backend of layers with equal caches and hands each of them the backend and its pages.

    Asks the backend again first, now that the layers themselves say what they need: a config could only be guessed
    from. Raises `ConfigError` for one that cannot serve them.
    """
    plugin, options = plugins.get(component)
    check_layers(component.name, plugin, options, setup, environment, whose=whose)
    backend: AttentionBackend = plugins.create(component, setup)
    for index, layer in enumerate(layers):
        layer.bind(backend, view(index, setup.spec, backend))
    return backend


def no_pages(index: int, spec: KVSpec, backend: AttentionBackend) -> torch.Tensor:
    """The `PageView` of layers that keep nothing."""
    return torch.empty(0)


def check_layers(
    name: str,
    plugin: type[AttentionBackend],
    options: PluginOptions,
    setup: AttentionSetup,
    environment: Environment,
    *,
    whose: str,
) -> None:
    """Raises `ConfigError` for a backend that has something against the layers themselves."""
    with calling(f"attention_backend {name!r}", "check"):
        reasons = reasons_against(plugin, _need(setup, environment.device_type), options, environment)
    if reasons:
        raise ConfigError(f"attention {name!r} cannot serve {whose} layers: {' '.join(reasons)}")


def _need(setup: AttentionSetup, device_type: str) -> AttentionNeed:
    return AttentionNeed(
        device_type=device_type,
        dtype=setup.dtype,
        block_size=setup.block_size,
        head_sizes=frozenset(layer.head_size for layer in setup.layers),
        sliding_window=any(layer.window is not None for layer in setup.layers),
        soft_cap=any(layer.soft_cap is not None for layer in setup.layers),
        alibi=any(layer.alibi_slopes is not None for layer in setup.layers),
        kv_dtype=setup.spec.dtype,
        sinks=any(layer.sinks is not None for layer in setup.layers),
        chunked=any(layer.chunk is not None for layer in setup.layers),
        batch_invariant=setup.batch_invariant,
        latents=setup.latent is not None,
        bidirectional=setup.keeps_nothing,
    )
