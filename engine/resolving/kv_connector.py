"""The rule about KV connectors: where blocks are kept besides the device."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedKVConnector
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv_connector import KVConnector
from dovetail.engine.resolving.choose import Chosen, choose
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
    if state.num_replicas > 1:
        _refuse_shared_address(state, chosen)
    return ResolvedKVConnector(
        chosen.component,
        section.load_seconds or _LOAD_S,
        int((section.queue_gib or _QUEUE_GIB) * 2**30),
    )


def _refuse_shared_address(state: Resolution, chosen: Chosen[KVConnector]) -> None:
    """Raises `ConfigError` for a connector to which other engines are sent: replicas have the same options, so that all
    would be found at one address."""
    with chosen.calling("transfer_params"):
        is_sent_to = bool(chosen.plugin.transfer_params(chosen.options))
    if is_sent_to:
        key = "server.data_parallel_size"
        raise ConfigError(
            f"{key} {state.num_replicas} ({state.layered.origin(key)}): other engines fetch blocks from kv_connector"
            f" {chosen.component.name!r} at one address, which replicas cannot share; leave it at 1, start one server"
            " per engine, or have the connector fetch only"
        )
