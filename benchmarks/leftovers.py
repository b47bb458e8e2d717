"""What a fault may leave behind."""

from __future__ import annotations

import os
from pathlib import Path


def shared_memory() -> set[str]:
    """This user's files of shared memory; none where the system has no such folder."""
    return {str(path) for path in Path("/dev/shm").glob("*") if path.stat().st_uid == os.getuid()}
