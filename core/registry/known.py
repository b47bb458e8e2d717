"""Plugins that are known to exist elsewhere: hints for the message about an unknown name.

Nothing is selected, loaded or ordered by this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KNOWN_PLUGINS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("executor", "ray"): "planned; use multiproc on one machine",
    }
)
"""(kind, name) -> the command that brings the plugin, or why none does."""
