"""The rule about routers: which one shares requests out among replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.config.resolved import Component
from dovetail.contracts.router import FollowsBlocks, Router
from dovetail.engine.resolving.choose import Question
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import ROUTER


def choose_router(state: Resolution) -> Component | None:
    """None where there is one replica; a name that is given has to be right there too. `auto` follows the blocks of
    prefix caches only where there are any."""
    server = state.config.server
    if server is None:
        return None
    if server.data_parallel_size == 1:
        if server.router.name != "auto":
            Question(state, ROUTER, None).pick()
            state.remark("server.router.name", "one replica serves, so nobody is asked (server.data_parallel_size)")
        return None
    has_blocks = state.config.cache.prefix_caching
    slot = ROUTER if has_blocks else replace(ROUTER, passes_over=_finds_no_blocks)
    question = Question(state, slot, None)
    chosen = question.pick()
    if chosen.answers and issubclass(chosen.plugin, FollowsBlocks):
        reason = "replicas report the blocks of their prefix caches (cache.prefix_caching), and it follows them"
        chosen = replace(chosen, reason=reason)
    question.settle(chosen)
    return chosen.component


def _finds_no_blocks(router: type[Router], need: Any) -> str | None:
    if issubclass(router, FollowsBlocks):
        return "it follows the blocks of prefix caches, and cache.prefix_caching is false"
    return None
