"""Keeps what it hears."""

from typing import Any

from dovetail.contracts.hooks import RequestControl, hookimpl
from dovetail.contracts.sampling import SamplingParams

heard: list[Any] = []


@hookimpl
def dovetail_engine_started(config: dict[str, Any], plugins: dict[str, str]) -> None:
    heard.append(("started", config["model"]["dtype"], plugins["executor"].rpartition(":")[2]))


@hookimpl
def dovetail_request_added(request_id: str, params: SamplingParams, control: RequestControl) -> None:
    if "held" in params.extra:
        control.hold(request_id)
        control.resume(request_id)
    heard.append(("request", params.extra.get("tenant")))


@hookimpl
def dovetail_weights_changed(version: int) -> None:
    heard.append(("weights", version))


@hookimpl
def dovetail_engine_stopped() -> None:
    heard.append(("stopped",))
