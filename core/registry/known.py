"""Plugins that are known to exist elsewhere: hints for the message about an unknown name.

Nothing is selected, loaded or ordered by this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KNOWN_PLUGINS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("attention_backend", "paged_triton"): 'pip install --upgrade "dovetail[triton]"',
        ("executor", "ray"): 'pip install --upgrade "dovetail[ray]"',
    }
)
"""(kind, name) -> the command that brings the plugin."""
