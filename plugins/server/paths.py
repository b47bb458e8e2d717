"""Paths of requests."""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path as routes declare it, without the prefix that a proxy took off."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
