"""Weighted fair queueing by what requests may take, on the public base of the bundled schedulers.

Each request is stamped with the virtual time at which its tenant would have been served it, had all tenants been served
at once (Demers, Keshav and Shenker, SIGCOMM 1989); the earliest stamp runs first.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import RequestState, SchedulerLimits
from dovetail.schedulers.batching import BatchingOptions, BatchingScheduler
from dovetail.schedulers.ranked_queue import Rank
from dovetail_fair_tenants.tenants import Tenants


class FairQueueingOptions(BatchingOptions):
    """Options of `FairQueueing`."""

    key: str = "tenant"
    """Key of `SamplingParams.extra` that names the tenant of a request."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Share of each tenant; 1 for others."""


class FairQueueing(BatchingScheduler):
    """Requests in order of virtual time; `BatchingScheduler` does the rest."""

    Options: ClassVar[type[PluginOptions]] = FairQueueingOptions

    def __init__(self, options: FairQueueingOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._tenants = Tenants(options.key, options.weights)
        self._now = 0.0
        """Virtual time: the stamp of the last request that ended."""
        self._last: dict[str, float] = {}
        """Tenant -> stamp of its last request."""
        self._stamps: dict[RequestState, float] = {}

    def rank(self, request: RequestState) -> Rank:
        """Its stamp: after its tenant's last, later by the tokens that it may take over the tenant's weight."""
        tenant = self._tenants.name(request)
        cost = self._tenants.weighted(tenant, request.num_prompt_tokens + request.max_tokens)
        stamp = max(self._now, self._last.get(tenant, 0.0)) + cost
        self._last[tenant] = self._stamps[request] = stamp
        return (stamp,)

    def remove(self, request: RequestState) -> None:
        """Forgets a request; virtual time moves on, and tenants of whom all is in the past are forgotten."""
        super().remove(request)
        self._now = max(self._now, self._stamps.pop(request))
        self._last = {tenant: stamp for tenant, stamp in self._last.items() if stamp > self._now}
