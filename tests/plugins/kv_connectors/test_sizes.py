"""A store in which not even one block fits would never keep anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv_connector import KVConnector, StoreSetup
from dovetail.plugins.kv_connectors.disk import Disk
from dovetail.plugins.kv_connectors.host import Host
from dovetail.plugins.kv_connectors.peer import Peer

SETUP = StoreSetup(namespace=bytes(32), rank=0, num_ranks=2, record_bytes=2**20)


@pytest.mark.parametrize(
    ("plugin", "options"),
    [(Host, {}), (Disk, {"path": "{folder}"}), (Peer, {"role": "producer", "port": 64999})],
    ids=["host", "disk", "peer"],
)
def test_a_size_below_one_block_is_refused(
    plugin: type[KVConnector], options: dict[str, object], tmp_path: Path
) -> None:
    folder = {name: str(tmp_path / "blocks") for name in options.keys() & {"path"}}
    validated = plugin.Options(**{**options, **folder, "size_gib": 0.0019})
    with pytest.raises(ConfigError, match=r"size_gib 0.0019 is too small: one block of this model takes 0.00195 GiB"):
        plugin.open_store(validated, SETUP)
    assert not (tmp_path / "blocks").exists()


def test_what_a_consumer_would_not_use_is_not_asked_for() -> None:
    options = Peer.Options(role="consumer", peers=("127.0.0.1:7150",), size_gib=0.0001)
    Peer.open_store(options, SETUP).close()
