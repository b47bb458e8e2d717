"""vLLM's `kv_transfer_params`: where the KV blocks of a request's prompt are, and where another engine finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.kv_connector import TRANSFER_PARAMS
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.route import APIError
from dovetail.plugins.server.sampling import SamplingFields


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
    if asked.get("do_remote_decode"):
        _check_producer(bool(body.stream), facts)
    return {"extra": {**(body.extra or {}), TRANSFER_PARAMS: asked}}


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
