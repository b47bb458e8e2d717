"""The keys of vLLM's `kv_transfer_config`, as data about another project's vocabulary."""

from __future__ import annotations

from dovetail.config.foreign_names import ForeignName, refused, works

_OWN_SOCKETS = ("blocks travel over sockets of the connector's own", "set host and port of kv_connector")
_STORAGE = (
    works("shared_storage_path", "str", "kv_connector.path"),
    works("cpu_bytes_to_use", "int", "kv_connector.size_gib", "bytes; the key counts GiB", factor=2.0**-30),
)

KV_TRANSFER: tuple[ForeignName, ...] = (
    works(
        "kv_connector",
        "str",
        "kv_connector.name",
        "any installed connector",
        values={
            "OffloadingConnector": "host",
            "SharedStorageConnector": "disk",
            "ExampleConnector": "disk",
            "NixlConnector": "peer",
            "P2pNcclConnector": "peer",
        },
        refuses={
            "LMCacheConnectorV1": "LMCache's connector runs inside vLLM's forward pass; use disk or host",
            "MultiConnector": "an engine has one connector; name it",
        },
    ),
    works(
        "kv_role",
        "str",
        "kv_connector.role",
        "an option of connector `peer`",
        values={"kv_producer": "producer", "kv_consumer": "consumer"},
        no_effect=("kv_both",),
    ),
    works("kv_ip", "str", "kv_connector.host", "an option of connector `peer`"),
    works("kv_port", "int", "kv_connector.port", "an option of connector `peer`"),
    ForeignName(
        "kv_connector_extra_config",
        "json",
        "works",
        note="what the connector's counterpart has",
        parts={one.name: one for one in _STORAGE},
    ),
    refused("kv_buffer_device", "str", "blocks go through host memory", "leave it out", "cpu"),
    refused("kv_buffer_size", "float", "queues count GiB", "set kv_connector.queue_gib"),
    refused("kv_parallel_size", "int", *_OWN_SOCKETS, 1),
    refused("kv_rank", "int", *_OWN_SOCKETS),
    refused("engine_id", "str", *_OWN_SOCKETS),
    refused("kv_connector_module_path", "str", "vLLM's classes do not speak this contract", "write a KVConnector"),
    refused("kv_load_failure_policy", "str", "what cannot be loaded is always computed", "leave it out", "recompute"),
)
