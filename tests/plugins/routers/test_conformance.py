"""The bundled routers under their suite."""

from __future__ import annotations

from dovetail.plugins.routers.least_tokens import LeastTokens
from dovetail.plugins.routers.prefix_aware import PrefixAware
from dovetail.plugins.routers.round_robin import RoundRobin
from dovetail.testing.router_suite import RouterSuite


class TestRoundRobin(RouterSuite):
    plugin = RoundRobin


class TestLeastTokens(RouterSuite):
    plugin = LeastTokens


class TestPrefixAware(RouterSuite):
    plugin = PrefixAware
