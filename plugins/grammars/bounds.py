"""Bounds of numbers that hold once a text has become a float.

A text may have more digits than a float: 0.25000000000000001 is more than 0.25, and every client reads it as 0.25. And
libraries compute with floats themselves, where bounds of many digits are not exact. So a bound moves inwards, to the
nearest number of twelve digits that is legal.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from dovetail.plugins.grammars.schemas import subschemas

_DIGITS = 12
_LEAST = Decimal("1e-12")
"""Distance from an exclusive bound of 0."""


def move_bounds(schema: Any) -> bool:
    """Moves the bounds of a schema and of those within, in place, and says whether there were any to move. Those of
    integers alone stay as they are."""
    moved = [_move(each) for each in subschemas(schema)]
    return any(moved)


def _move(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", "number")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    before = dict(schema)
    for inclusive, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bounds = [_inside(schema[name], sign, name == exclusive) for name in (inclusive, exclusive) if name in schema]
        if not bounds:
            continue
        tightest = max(bounds) if sign > 0 else min(bounds)
        schema.pop(exclusive, None)
        schema[inclusive] = int(tightest) if tightest == int(tightest) else float(tightest)
    return schema != before


def _inside(bound: float, sign: int, is_exclusive: bool) -> Decimal:
    exact = Decimal(repr(bound))
    if not exact:
        return sign * _LEAST if is_exclusive else exact
    unit = Decimal(1).scaleb(exact.adjusted() - _DIGITS + 1)
    rounded = exact.quantize(unit, rounding=ROUND_CEILING if sign > 0 else ROUND_FLOOR) if _is_long(exact) else exact
    return rounded + sign * unit if is_exclusive and rounded == exact else rounded


def _is_long(value: Decimal) -> bool:
    return len(value.normalize().as_tuple().digits) > _DIGITS
