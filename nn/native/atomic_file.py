"""Files that are there whole or not at all, whoever else writes them and whenever a process dies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_PREFIX = ".writing-"
"""Of files that are not finished; one that stays was left by a writer that died."""


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """A file of one's own beside `target`, which takes its place, on disk for good, when the block ends. Where the
    block raises it is deleted, and `target` stays as it was. Raises `OSError`."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=TEMPORARY_PREFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
