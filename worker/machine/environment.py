"""Facts about this machine for plugins, gathered once per process."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import psutil

from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.registry.distributions import installed_versions, requirements
from dovetail.registry.entries import normalize_name
from dovetail.worker.activity import activity
from dovetail.worker.machine.collector import collector_paused
from dovetail.worker.machine.cuda import find_driver, why_no_devices

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def detect_environment(device_type: str | None = None) -> Environment:
    """The machine as this process may use it: CPUs and memory within affinity and control-group limits.

    `device_type` None: "cuda" where torch sees one, else "cpu". torch is imported unless `device_type` is "cpu".
    """
    devices, no_devices = ((), "") if device_type == "cpu" else _cuda_devices()
    if device_type is None:
        device_type = "cuda" if devices else "cpu"
    group = _own_cgroup()
    num_cpus, cores = _num_cpus(cgroup_cpu_limit(group)), psutil.cpu_count(logical=False)
    return Environment(
        device_type=device_type,
        num_cpus=num_cpus,
        num_cores=None if cores is None else min(cores, num_cpus),
        memory_bytes=host_memory(group),
        cpu_features=cpu_features(_read(Path("/proc/cpuinfo")) or ""),
        devices=devices,
        packages=_packages(),
        no_devices=no_devices,
        torch_pins=pins(requirements("torch")),
    )


def host_memory(groups: list[Path] | None = None) -> int:
    """Bytes of memory, within the limits of this process's control groups."""
    limit = cgroup_memory_limit(_own_cgroup() if groups is None else groups)
    total: int = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Instruction sets of the first processor in the text of /proc/cpuinfo; empty where there are none."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def cgroup_memory_limit(groups: list[Path]) -> int | None:
    """The smallest memory limit in bytes of a control group and its parents, None where there is none."""
    limits = []
    for group in groups:
        for file in (group / "memory.max", group / "memory.limit_in_bytes"):
            text = (_read(file) or "").strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def cgroup_cpu_limit(groups: list[Path]) -> float | None:
    """The smallest CPU limit of a control group and its parents in CPUs, None where there is none."""
    limits = []
    for group in groups:
        text = _read(group / "cpu.max")
        if text is None:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
            text = f"{quota} {period}"
        parts = text.split()
        # An unlimited quota is "max" in version 2 and -1 in version 1.
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            limits.append(int(parts[0]) / int(parts[1]))
    return min(limits, default=None)


def _own_cgroup() -> list[Path]:
    """Directories of this process's control groups (versions 1 and 2) and of their parents."""
    directories: dict[Path, None] = {}
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = _CGROUP_ROOT / controllers if controllers else _CGROUP_ROOT
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                directories[directory] = None
    return list(directories)


def _num_cpus(limit: float | None) -> int:
    try:
        available = len(psutil.Process().cpu_affinity() or ())
    except AttributeError:  # macOS has no affinity
        available = 0
    available = available or os.cpu_count() or 1
    return available if limit is None else max(1, min(available, int(limit)))


def pins(requirements: Iterable[str]) -> dict[str, str]:
    """Name and version of a distribution's requirements with one exact version."""
    found = {}
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        match = re.fullmatch(r"([\w.-]+)\s*\(?==\s*([\w.+!-]+)\)?", wanted.strip())
        if match is not None and "extra" not in marker:
            found[normalize_name(match[1])] = match[2]
    return found


def _cuda_devices() -> tuple[tuple[DeviceInfo, ...], str]:
    """The CUDA devices, or why there are none."""
    with activity("importing torch"), collector_paused():
        import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of old drivers in terms of its own
        is_available = torch.cuda.is_available()
    if not is_available:
        driver = None if torch.version.cuda is None else find_driver()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (), why_no_devices(torch.__version__, torch.version.cuda, driver, visible)
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(DeviceInfo(properties.name, properties.total_memory, (properties.major, properties.minor)))
    return tuple(devices), ""


def _packages() -> dict[str, str]:
    """Installed distributions among those that Dovetail or its extras require."""
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements("dovetail"))
    versions = installed_versions(name[0] for name in names if name is not None)
    return {normalize_name(name): version for name, version in versions.items()}


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
