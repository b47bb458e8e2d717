"""OpenAI's `system_fingerprint`: what the tokens of a seeded request depend on, besides the request."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import metadata

from dovetail.contracts.engine_client import EngineFacts


def system_fingerprint(facts: EngineFacts) -> str:
    """The same for the same version of Dovetail over an engine of the same facts."""
    return _fingerprint(repr(facts))


@lru_cache(maxsize=4)
def _fingerprint(facts: str) -> str:
    version = metadata.version("dovetail")
    return f"dovetail-{version}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
