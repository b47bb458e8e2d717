"""What installed distributions say of themselves. Each start of an engine asks some fifty of them, several times.

Looking for one goes through the whole import path, and parsing METADATA takes milliseconds: so a distribution is looked
for once for as long as no folder of the path changes, and each text is parsed once. Which text is there is read each
time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from functools import lru_cache
from importlib import metadata

_MOST_TEXTS = 512
_MOST_DISTRIBUTIONS = 512


def installed_version(distribution: str) -> str | None:
    """Version of a distribution in this process, None where it is absent."""
    found = _installed(distribution)
    return None if found is None else headers(found)["Version"]


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed, by name."""
    found = ((name, installed_version(name)) for name in distributions)
    return {name: version for name, version in found if version is not None}


def requirements(distribution: str) -> list[str]:
    """What a distribution requires, with its extras; nothing where it is absent."""
    found = _installed(distribution)
    if found is None:
        return []
    # An old `*.egg-info` has them in a file of its own.
    return [str(one) for one in headers(found).get_all("Requires-Dist", [])] or found.requires or []


def headers(distribution: metadata.Distribution) -> Message:
    """As `Distribution.metadata`, to be read only."""
    texts = (distribution.read_text(name) for name in ("METADATA", "PKG-INFO", ""))
    return _parsed(next(filter(None, texts), ""))


def _installed(distribution: str) -> metadata.Distribution | None:
    return _found(distribution, tuple((folder, _changed_ns(folder)) for folder in sys.path))


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(_MOST_DISTRIBUTIONS)
def _found(distribution: str, path: tuple[tuple[str, int], ...]) -> metadata.Distribution | None:
    """`path`: the import path, and when each folder changed, which it does where something is installed or removed."""
    try:
        return metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(_MOST_TEXTS)
def _parsed(text: str) -> Message:
    return HeaderParser().parsestr(text)
