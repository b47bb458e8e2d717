"""What a response says of `required_prefix_token_ids`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dovetail.contracts.prompts import PrefixVerdict


def prefix_fields(verdict: PrefixVerdict | None) -> dict[str, Any]:
    """`prefix_verdict`, with the fields of `PrefixVerdict`; nothing where the request asked for no prefix."""
    return {} if verdict is None else {"prefix_verdict": asdict(verdict)}
