"""The lock of a run: what it is made of, to the last file, so that two machines can be proven equal, or their
differences named."""

from __future__ import annotations

from dovetail.engine.locking.compare import Difference, compare_locks, compare_with_machine, uncompared_parts
from dovetail.engine.locking.lock import Lock, LockedCode, LockedModel, LockedPart, not_as_installed, take_lock
from dovetail.engine.locking.lock_file import check_target, read_lock, write_lock

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
