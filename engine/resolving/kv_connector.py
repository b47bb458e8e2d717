"""The rule about KV connectors: where blocks are kept besides the device."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedKVConnector
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving.choose import choose
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import KV_CONNECTOR

_LOAD_S = 10.0
_QUEUE_GIB = 1.0


def choose_kv_connector(state: Resolution, is_encoder: bool) -> ResolvedKVConnector | None:
    """None where the config names none. Raises `ConfigError` where no block would ever be found."""
    section = state.config.kv_connector
    if section is None:
        return None
    origin = state.layered.origin("kv_connector.name")
    if is_encoder:
        raise ConfigError(f"kv_connector.name ({origin}): an encoder keeps no KV blocks; set kv_connector to null")
    if not state.config.cache.prefix_caching:
        raise ConfigError(
            f"kv_connector.name ({origin}): blocks are found by their content, and cache.prefix_caching is false; set"
            " it to true, or kv_connector to null"
        )
    chosen = choose(state, KV_CONNECTOR, None)
    return ResolvedKVConnector(
        chosen.component,
        section.load_seconds or _LOAD_S,
        int((section.queue_gib or _QUEUE_GIB) * 2**30),
    )
