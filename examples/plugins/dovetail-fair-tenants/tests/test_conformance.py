"""Both pass the suite of their kind."""

from __future__ import annotations

from dovetail_fair_tenants.fair_queueing import FairQueueing
from dovetail_fair_tenants.fair_share import FairShare

from dovetail.testing import SchedulerSuite


class TestFairShare(SchedulerSuite):
    plugin = FairShare


class TestFairQueueing(SchedulerSuite):
    plugin = FairQueueing
