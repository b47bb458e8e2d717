"""Reasons that hold for plans and for reports."""

from __future__ import annotations

from typing import Any, Final

from dovetail.contracts.engine_client import EngineFacts

NO_ADAPTER: Final[dict[str, Any]] = {"name": None, "why": "this engine serves no adapters"}


def chosen_adapter(name: str, facts: EngineFacts) -> dict[str, Any]:
    """The adapter that was added to the weights, "" for none."""
    if name:
        return {"name": name, "why": "the request names it"}
    return {"name": None, "why": "the request names none"} if facts.max_loras else NO_ADAPTER


def why_drafter(asked: str | None, facts: EngineFacts) -> str:
    """Why a request has its drafter, or none. `asked`: as in `SamplingParams.speculation`."""
    if facts.acceptance is None:
        return "the config has no section speculative"
    if asked == "off":
        return "the request says speculation: off"
    if asked is not None:
        return "the request names it (speculation)"
    if facts.default_drafter is None:
        return "speculative.default is null, and the request names no drafter (speculation)"
    return "speculative.default of the config"


def may_differ(asked: str | None, facts: EngineFacts) -> str:
    """What may give a request another drafter once it comes, to be added to `why_drafter`; "" for nothing."""
    if asked is not None or not facts.experiments:
        return ""
    return f"; an arm of the config's experiments ({', '.join(facts.experiments)}) may choose another"
