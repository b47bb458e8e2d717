"""What each replica gets of the machine that all of them share: cores of its own, and devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.contracts.errors import ConfigError

_GPUS = Path("/proc/driver/nvidia/gpus")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class ReplicaShare:
    """One replica's."""

    cores: frozenset[int] = frozenset()
    """Logical CPUs that its process runs on; empty: all that this one may use."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process."""


def replica_shares(
    count: int,
    devices: Sequence[str] = (),
    device: str = "auto",
    *,
    cores: Sequence[Sequence[int]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[ReplicaShare]:
    """Equal shares of cores, which are consecutive ones, and of the devices.

    Args:
        count: replicas. One gets everything.
        devices: CUDA_VISIBLE_DEVICES of each, where the config says so (`server.data_parallel_devices`).
        device: the config's.
        cores: the logical CPUs of each physical core; None: those of this machine that this process may use.
        environment: None: this process's.

    Raises `ConfigError` where replicas would compute on the same GPUs and the config does not say so.
    """
    environment = os.environ if environment is None else environment
    if devices and len(devices) != count:
        raise ConfigError(
            f"server.data_parallel_devices has {len(devices)} entries, and server.data_parallel_size is {count}: give"
            " each replica its own, such as ['0,1', '2,3']"
        )
    visible = list(devices) or _device_shares(count, device, environment)
    if count == 1:
        return [ReplicaShare(environment={"CUDA_VISIBLE_DEVICES": visible[0]} if visible else {})]
    groups = sorted(sorted(core) for core in (_usable_cores() if cores is None else cores))
    shares = []
    for index in range(count):
        mine = groups[index * len(groups) // count : (index + 1) * len(groups) // count]
        variables = {} if "OMP_NUM_THREADS" in environment else {"OMP_NUM_THREADS": str(max(1, len(mine)))}
        if visible:
            variables["CUDA_VISIBLE_DEVICES"] = visible[index]
        has_own = len(groups) >= count
        shares.append(ReplicaShare(frozenset(cpu for core in mine for cpu in core if has_own), variables))
    return shares


def _device_shares(count: int, device: str, environment: Mapping[str, str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica; empty where there is nothing to share out."""
    if count == 1 or device not in ("auto", "cuda"):
        return []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        found = [name for name in listed.split(",") if name.strip() not in ("", "-1")]
    else:
        found = [str(index) for index in range(len(list(_GPUS.iterdir()) if _GPUS.is_dir() else []))]
    share = len(found) // count
    if found and not share:
        raise ConfigError(
            f"server.data_parallel_size is {count}, and there are {len(found)} GPUs: replicas would compute on the same"
            " one. Take fewer replicas, device: cpu, or say which GPU each uses (server.data_parallel_devices: ['0',"
            " '0']), with a cache.memory_fraction that leaves the others theirs"
        )
    return [",".join(found[index * share : (index + 1) * share]) for index in range(count if share else 0)]


def _usable_cores() -> list[list[int]]:
    """The logical CPUs of each physical core that this process may use; none on systems that bind no processes."""
    if sys.platform != "linux":
        return []
    usable = os.sched_getaffinity(0)
    cores: dict[str, list[int]] = {}
    for cpu in sorted(usable):
        try:
            core = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:  # a container that hides it
            core = str(cpu)
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())
