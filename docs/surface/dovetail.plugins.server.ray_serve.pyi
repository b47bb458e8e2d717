from collections.abc import Iterable, Mapping
from dovetail.commands import LayeredConfig
from pathlib import Path
from typing import Any

def build_app(
    config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
    *,
    options: Iterable[str] = (),
    **deployment: Any,
) -> Any: ...
def app(arguments: dict[str, Any]) -> Any: ...
