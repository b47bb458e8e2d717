"""The status of a worker in the engine's process."""

from __future__ import annotations

import os

import psutil

from dovetail.contracts.executor import RankStatus
from dovetail.executors.processes._status import device_bytes


def own_status(device: str) -> RankStatus:
    """Reads the memory of this process. `device`: as `Placement.device`."""
    return RankStatus(
        rank=0,
        stage=0,
        tensor_rank=0,
        node="this machine",
        device=device,
        pid=os.getpid(),
        memory_bytes=psutil.Process().memory_info().rss,
        device_bytes=device_bytes(device),
    )
