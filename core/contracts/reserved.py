"""Fields that records have for what is not built yet: their meaning is settled, and using one is refused."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.errors import PluginError


def refuse_reserved(record: str, fields: Mapping[str, tuple[object, str]]) -> None:
    """Raises `PluginError` for the first field that is used. `fields`: by name its value, of which a false one stands
    for unused, and what is missing, as a sentence without its full stop."""
    for name, (value, missing) in fields.items():
        if value:
            raise PluginError(f"{record}.{name} is reserved: {missing}. Leave it out")
