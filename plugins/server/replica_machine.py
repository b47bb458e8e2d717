"""What each replica gets of the machine that all of them share."""

from __future__ import annotations

import os

import psutil


def replica_environment(index: int, num_replicas: int) -> dict[str, str]:
    """Returns environment variables of the replica `index`: its share of the CPU threads, unless OMP_NUM_THREADS says
    how many, and of the GPUs, where CUDA_VISIBLE_DEVICES lists enough of them. Empty for one replica."""
    if num_replicas == 1:
        return {}
    environment: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = min(psutil.cpu_count(logical=False) or 1, len(psutil.Process().cpu_affinity() or [0]))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // num_replicas))
    devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    share = len(devices) // num_replicas
    if share:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * share : (index + 1) * share])
    return environment
