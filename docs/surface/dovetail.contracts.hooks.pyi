import pluggy
from collections.abc import Iterable
from dovetail.contracts.sampling import SamplingParams
from typing import Any, Protocol

PROJECT = 'dovetail'
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

class RequestControl(Protocol):
    def hold(self, request_ids: str | Iterable[str]) -> None: ...
    def resume(self, request_ids: str | Iterable[str]) -> None: ...

@hookspec
def dovetail_engine_started(
    config: dict[str, Any],
    plugins: dict[str, str],
    control: RequestControl,
) -> None: ...
@hookspec
def dovetail_engine_stopped() -> None: ...
@hookspec
def dovetail_request_added(
    request_id: str,
    params: SamplingParams,
    control: RequestControl,
) -> None: ...
@hookspec
def dovetail_weights_changed(version: int) -> None: ...
