"""The hardware as this process may use it: /sys and /proc on Linux, sysctl on macOS, psutil for the rest."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import psutil

from dovetail.contracts.plugin import Environment
from dovetail.plugins.commands.doctor.facts import CPU, Cache, Machine, Memory, NUMANode

_SYSCTL_FEATURES = {
    "FEAT_FP16": "asimdhp",
    "FEAT_DotProd": "asimddp",
    "FEAT_I8MM": "i8mm",
    "FEAT_BF16": "bf16",
    "FEAT_SME": "sme",
    "AdvSIMD": "asimd",
    "avx2_0": "avx2",
    "avx512f": "avx512f",
}
"""Names under macOS's hw.optional -> the spelling of /proc/cpuinfo."""


def examine_machine(environment: Environment, root: Path = Path("/")) -> Machine:
    """Reads what the system says. `root` is where its /proc and /sys lie."""
    sysctl = _sysctl() if sys.platform == "darwin" else {}
    cpus = _usable_cpus()
    system = root / "sys/devices/system"
    return Machine(
        cpu=_cpu(environment, cpus, system, root / "proc/cpuinfo", sysctl),
        caches=_caches(system / "cpu", cpus) or sysctl_caches(sysctl),
        nodes=_nodes(system / "node", cpus),
        memory=_memory(environment, root),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's lists: "0-3,8" -> (0, 1, 2, 3, 8)."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def parse_size(text: str) -> int:
    """The kernel's sizes in bytes: "512K" -> 524288."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def cpu_model(cpuinfo: str) -> str | None:
    """The processor's name in the text of /proc/cpuinfo; on ARM its numbers, since it has no name there."""
    fields = dict(re.findall(r"^(.+?)\s*:\s*(.+)$", cpuinfo, re.MULTILINE))
    for key in ("model name", "Model", "cpu model"):
        if key in fields:
            return str(fields[key])
    if "CPU part" in fields:
        return f"ARM implementer {fields.get('CPU implementer', '?')}, part {fields['CPU part']}"
    return None


def sysctl_features(values: dict[str, str]) -> frozenset[str]:
    """Instruction sets that macOS's hw.optional says are there."""
    found = {key.rpartition(".")[2] for key, value in values.items() if "hw.optional" in key and value == "1"}
    return frozenset(feature for name, feature in _SYSCTL_FEATURES.items() if name in found)


def sysctl_caches(values: dict[str, str]) -> tuple[Cache, ...]:
    """Data caches as macOS reports them; it does not say how many there are."""
    names = {1: "hw.l1dcachesize", 2: "hw.l2cachesize", 3: "hw.l3cachesize"}
    sizes = {level: int(values.get(name, "0")) for level, name in names.items()}
    return tuple(Cache(level, size, 1) for level, size in sizes.items() if size)


def _usable_cpus() -> tuple[int, ...]:
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cpu(environment: Environment, cpus: tuple[int, ...], system: Path, cpuinfo: Path, sysctl: dict[str, str]) -> CPU:
    topology = [system / f"cpu/cpu{cpu}/topology" for cpu in cpus]
    packages = [_read(folder / "physical_package_id") for folder in topology]
    cores = {(package, _read(folder / "core_id")) for package, folder in zip(packages, topology, strict=True)}
    is_told = bool(packages) and None not in packages
    physical = psutil.cpu_count(logical=False) or len(cpus)
    name = cpu_model(_read(cpuinfo) or "") or sysctl.get("machdep.cpu.brand_string")
    return CPU(
        model=name or platform.processor() or "unknown",
        architecture=platform.machine(),
        cpus=cpus,
        machine_cpus=os.cpu_count() or len(cpus),
        cores=len(cores) if is_told else min(physical, len(cpus)),
        quota=environment.num_cpus if environment.num_cpus < len(cpus) else None,
        sockets=len(set(packages)) if is_told else None,
        features=environment.cpu_features or sysctl_features(sysctl),
    )


def _caches(folder: Path, cpus: tuple[int, ...]) -> tuple[Cache, ...]:
    instances: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    for cpu in cpus:
        for index in sorted((folder / f"cpu{cpu}/cache").glob("index*")):
            level, size = _read(index / "level"), _read(index / "size")
            if level is None or size is None or _read(index / "type") == "Instruction":
                continue
            instances.setdefault(int(level), set()).add(_read(index / "shared_cpu_list") or str(cpu))
            sizes[int(level)] = parse_size(size)
    return tuple(Cache(level, sizes[level], len(instances[level])) for level in sorted(sizes))


def _nodes(folder: Path, cpus: tuple[int, ...]) -> tuple[NUMANode, ...]:
    nodes = []
    for path in folder.glob("node[0-9]*"):
        near = set(parse_cpu_list(_read(path / "cpulist") or "")) & set(cpus)
        meminfo = _read(path / "meminfo") or ""
        nodes.append(
            NUMANode(
                int(path.name.removeprefix("node")),
                tuple(sorted(near)),
                _kilobytes(meminfo, "MemTotal"),
                _kilobytes(meminfo, "MemFree"),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


def _memory(environment: Environment, root: Path) -> Memory:
    memory = psutil.virtual_memory()
    setting = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    reserved = re.search(r"^HugePages_Total:\s*(\d+)", _read(root / "proc/meminfo") or "", re.MULTILINE)
    return Memory(
        total=environment.memory_bytes,
        available=min(memory.available, environment.memory_bytes),
        swap_used=psutil.swap_memory().used,
        transparent_huge_pages=setting[1] if setting else None,
        reserved_huge_pages=int(reserved[1]) if reserved else None,
    )


def _kilobytes(text: str, name: str) -> int | None:
    match = re.search(rf"{name}:\s*(\d+) kB", text)
    return int(match[1]) << 10 if match else None


def _sysctl() -> dict[str, str]:
    try:
        done = subprocess.run(["sysctl", "-a"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(":") for line in done.stdout.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
