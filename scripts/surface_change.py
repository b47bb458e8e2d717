"""One change of the public surface, and whom it breaks."""

from __future__ import annotations

from dataclasses import dataclass

import griffe

CALLERS, IMPLEMENTERS, BOTH, NOBODY = "callers", "implementers", "callers and implementers", ""
"""Callers call, read or construct; implementers subclass, and are called by the host."""
KEEP = "keep the old name for two minors and mark it with dovetail.contracts.deprecation"
OPTIONAL = "give it a default that means what was before"
NEW_NAME = "leave this as it is and add what is new under a name of its own"


@dataclass(frozen=True)
class Change:
    """One difference between two versions of a surface. What breaks nobody is an addition."""

    path: str
    what: str
    breaks: str = NOBODY
    why: str = ""
    instead: str = ""
    """What to do where the break is not meant."""


def canonical(expression: griffe.Expr | str | None) -> str:
    """The expression with full names, so that the way in which something was imported does not matter."""
    if isinstance(expression, griffe.ExprName | griffe.ExprAttribute):
        return expression.canonical_path
    if isinstance(expression, griffe.Expr):
        return "".join(canonical(part) for part in expression.iterate(flat=False))
    return expression or ""
