"""The bundled KV connectors under their suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.plugins.kv_connectors.disk import Disk
from dovetail.plugins.kv_connectors.host import Host
from dovetail.plugins.kv_connectors.peer import Peer
from dovetail.testing.kv_connector_suite import KVConnectorSuite
from tests.ports import free_ports

_SMALL = 6 * 4096 / 2**30


PORT = free_ports(2)


class TestHost(KVConnectorSuite):
    plugin = Host
    small_options: ClassVar[Mapping[str, Any]] = {"size_gib": _SMALL}


class TestDisk(KVConnectorSuite):
    plugin = Disk
    options: ClassVar[Mapping[str, Any]] = {"path": "{folder}"}
    small_options: ClassVar[Mapping[str, Any]] = {"path": "{folder}", "size_gib": _SMALL}


class TestPeer(KVConnectorSuite):
    """It fetches from itself."""

    plugin = Peer
    options: ClassVar[Mapping[str, Any]] = {"port": PORT, "peers": [f"127.0.0.1:{PORT}"], "wait_seconds": 0}
    small_options: ClassVar[Mapping[str, Any]] = {**options, "size_gib": _SMALL}
    transfer: ClassVar[Mapping[str, Any]] = {"remote_host": "127.0.0.1", "remote_port": PORT}
