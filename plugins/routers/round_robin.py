"""Requests go to the replicas in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import ReplicaState, RoutedRequest, Router, RouterSetup


class RoundRobin(Router):
    """Sends each request to the next replica that is up."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self._next = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        count = len(replicas)
        index = next(i % count for i in range(self._next, self._next + count) if replicas[i % count].is_up)
        self._next = index + 1
        return index
