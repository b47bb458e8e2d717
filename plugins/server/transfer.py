"""vLLM's `kv_transfer_params`: where the KV blocks of a request's prompt are, and where another engine finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.kv_connector import TRANSFER_PARAMS
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.route import APIError
from dovetail.plugins.server.sampling import SamplingFields

_FLAGS = ("do_remote_prefill", "do_remote_decode")
_PLACE = ("remote_host", "remote_port")
_UNREAD = (
    "remote_block_ids",
    "remote_bootstrap_addr",
    "remote_dp_rank",
    "remote_dp_size",
    "remote_engine_id",
    "remote_handshake_port",
    "remote_notify_port",
    "remote_num_tokens",
    "remote_request_id",
    "tp_size",
    "transfer_id",
)
"""What connectors of vLLM send besides; blocks are found by their content here."""
_KNOWN = frozenset((*_FLAGS, *_PLACE, *_UNREAD))


class TransferFields(SamplingFields, kw_only=True):
    """Fields of requests that one engine may begin and another go on with."""

    kv_transfer_params: dict[str, Any] | None = None


def transfer_values(body: TransferFields, facts: EngineFacts) -> dict[str, Any]:
    """What the field adds to a request's `SamplingParams`. Raises `APIError` 400 for what cannot be served."""
    asked = body.kv_transfer_params
    if asked is None:
        return {}
    if TRANSFER_PARAMS in (body.extra or {}):
        message = "kv_transfer_params is given twice, in extra too: give it once"
        raise APIError(400, message, param=TRANSFER_PARAMS)
    if (wrong := _mistake(asked)) is not None:
        raise APIError(400, f"kv_transfer_params{wrong}", param=TRANSFER_PARAMS)
    if asked.get("do_remote_decode"):
        _check_producer(bool(body.stream), facts)
    return {"extra": {**(body.extra or {}), TRANSFER_PARAMS: asked}}


def _mistake(asked: Mapping[str, Any]) -> str | None:
    """What would be ignored without a word. A key with null is one that is not given."""
    given = {key: value for key, value in asked.items() if value is not None}
    own = [key for key in given if "." in key]
    for key in given:
        if key not in _KNOWN and key not in own:
            return f".{key}: no such key; there are {', '.join((*_FLAGS, *_PLACE))}, and those of a plugin have a dot"
    for key in _FLAGS:
        if not isinstance(given.get(key, False), bool):
            return f".{key} is {given[key]!r}: send true or false"
    if not isinstance(given.get("remote_host", "-"), str) or given.get("remote_host") == "":
        return f".remote_host is {given['remote_host']!r}: send an address as a string"
    port = given.get("remote_port", 1)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        return f".remote_port is {port!r}: send a whole number from 1 to 65535"
    missing = [key for key in _PLACE if key not in given]
    if len(missing) == 1 or (missing and given.get("do_remote_prefill") and not own):
        return f" says not where the blocks are: send {' and '.join(missing)} as the prefill engine answered them"
    return None


def _check_producer(streams: bool, facts: EngineFacts) -> None:
    if not facts.kv_transfer_params:
        message = (
            "kv_transfer_params.do_remote_decode: no other engine can read this one's KV blocks; configure kv_connector"
            " {name: peer, role: producer}, or send the request without it"
        )
        raise APIError(400, message, param=TRANSFER_PARAMS)
    if streams:
        message = (
            "kv_transfer_params.do_remote_decode: a stream has no place for the kv_transfer_params of the answer; leave"
            " stream out"
        )
        raise APIError(400, message, param=TRANSFER_PARAMS)


def transfer_fields(outputs: Sequence[RequestOutput]) -> Mapping[str, Any]:
    """What a whole response says of it; nothing where nobody asked. All outputs of one response are of one engine."""
    found = next((output.kv_transfer_params for output in outputs if output.kv_transfer_params is not None), None)
    return {} if found is None else {TRANSFER_PARAMS: dict(found)}
