"""What installed distributions say of themselves. Each start of an engine asks some fifty of them, and parsing METADATA
takes milliseconds, so each text is parsed once; which text is there is looked up each time."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from functools import lru_cache
from importlib import metadata

_MOST_TEXTS = 512


def installed_version(distribution: str) -> str | None:
    """Version of a distribution in this process, None where it is absent."""
    headers = _headers(distribution)
    return None if headers is None else headers["Version"]


def requirements(distribution: str) -> list[str]:
    """What a distribution requires, with its extras; nothing where it is absent."""
    headers = _headers(distribution)
    return [] if headers is None else [str(one) for one in headers.get_all("Requires-Dist", [])]


def _headers(distribution: str) -> Message | None:
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    return _parsed(found.read_text("METADATA") or found.read_text("PKG-INFO") or found.read_text("") or "")


@lru_cache(_MOST_TEXTS)
def _parsed(text: str) -> Message:
    return HeaderParser().parsestr(text)
