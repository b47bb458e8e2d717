"""Records as columns, one list per field: thousands of rows in a JSON file without their names repeated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Record = TypeVar("Record")


def to_columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Dataclasses of one kind as plain columns; no rows have none."""
    if not rows:
        return {}
    return {field.name: [plain(getattr(row, field.name)) for row in rows] for field in fields(rows[0])}


def from_columns(kind: type[Record], columns: Mapping[str, Sequence[Any]]) -> list[Record]:
    """The rows of columns. Raises `TypeError` for columns that `kind` lacks or needs, `ValueError` for columns of
    different lengths."""
    return [kind(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON has them; what is no number becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        # Infinities and NaN are no JSON; nanoseconds suffice.
        return round(value, 9) if math.isfinite(value) else None
    return value if isinstance(value, int | str | bool) or value is None else str(value)
