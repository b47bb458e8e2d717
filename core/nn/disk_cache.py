"""Where Dovetail keeps what it can make again: compiled kernels and packed weights."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_directory() -> Path:
    """The user's cache folder for Dovetail, as the operating system has it. It may not exist yet."""
    return Path(platformdirs.user_cache_dir("dovetail", appauthor=False))
