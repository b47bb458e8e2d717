"""Cells of tables."""

from __future__ import annotations

from rich.text import Text


def cells(*values: str) -> list[Text]:
    """Texts, so that square brackets in names are no markup."""
    return [Text(value, overflow="fold") for value in values]
