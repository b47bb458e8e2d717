"""Bundled routes of the server."""

from __future__ import annotations

from typing import Final

DEFAULT_ROUTES: Final = (
    "health",
    "metrics",
    "models",
    "completions",
    "chat",
    "responses",
    "messages",
    "tokenize",
    "explain",
    "lora",
    "pooling",
    "playground",
)
"""Routes that a server has where its config says nothing."""
