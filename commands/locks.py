"""Locks of runs: taken, written, read and compared."""

from __future__ import annotations

from dovetail.engine.locking import (
    Difference,
    Lock,
    LockedCode,
    LockedModel,
    LockedPart,
    check_target,
    compare_locks,
    compare_with_machine,
    not_as_installed,
    read_lock,
    take_lock,
    uncompared_parts,
    write_lock,
)

__all__ = [
    "Difference",
    "Lock",
    "LockedCode",
    "LockedModel",
    "LockedPart",
    "check_target",
    "compare_locks",
    "compare_with_machine",
    "not_as_installed",
    "read_lock",
    "take_lock",
    "uncompared_parts",
    "write_lock",
]
