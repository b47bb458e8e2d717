"""What `dovetail doctor` reads from the system, from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.plugin import Environment
from dovetail.plugins.commands.doctor.features import INSTRUCTION_SETS, features_in, instruction_sets
from dovetail.plugins.commands.doctor.load import LoadWatch, load_of
from dovetail.plugins.commands.doctor.machine import (
    cpu_model,
    examine_machine,
    parse_cpu_list,
    parse_size,
    sysctl_caches,
    sysctl_features,
)
from dovetail.plugins.commands.doctor.software import examine_kernel
from dovetail.plugins.commands.doctor.units import numbers, size

SYSCTL = {
    "hw.l2cachesize": "4194304",
    "hw.optional.arm.FEAT_DotProd": "1",
    "hw.optional.arm.FEAT_BF16": "0",
    "hw.optional.AdvSIMD": "1",
}


def environment(num_cpus: int = 64) -> Environment:
    return Environment("cpu", num_cpus=num_cpus, memory_bytes=8 << 30, cpu_features=frozenset({"avx2"}))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_survive_writing_and_reading(cpus: set[int]) -> None:
    ordered = tuple(sorted(cpus))
    assert parse_cpu_list(numbers(ordered)) == ordered


def test_sizes_of_caches() -> None:
    assert [parse_size(text) for text in ("32K", "4096K", "1M", "64")] == [32 << 10, 4 << 20, 1 << 20, 64]
    with pytest.raises(ValueError, match="no size"):
        parse_size("some")


def test_a_machine_with_two_threads_per_core_and_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.plugins.commands.doctor.machine._usable_cpus", lambda: (0, 1, 2, 3))
    system = "sys/devices/system"
    for cpu in range(4):
        topology = f"{system}/cpu/cpu{cpu}/topology"
        write(tmp_path, {f"{topology}/physical_package_id": str(cpu // 2), f"{topology}/core_id": "0"})
        cache = f"{system}/cpu/cpu{cpu}/cache/index2"
        first = cpu // 2 * 2
        shared = f"{first}-{first + 1}"
        write(tmp_path, {f"{cache}/level": "2", f"{cache}/size": "512K", f"{cache}/shared_cpu_list": shared})
    for node in range(2):
        folder = f"{system}/node/node{node}"
        meminfo = f"Node {node} MemTotal: 2048 kB\nNode {node} MemFree: 1024 kB\n"
        write(tmp_path, {f"{folder}/cpulist": f"{2 * node}-{2 * node + 1}", f"{folder}/meminfo": meminfo})
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"})
    machine = examine_machine(environment(num_cpus=3), tmp_path)
    assert (machine.cpu.cores, machine.cpu.sockets, machine.cpu.quota, machine.cpu.usable_cores) == (2, 2, 3, 2)
    assert [(cache.level, cache.size, cache.instances) for cache in machine.caches] == [(2, 512 << 10, 2)]
    assert [(node.cpus, node.memory, node.free) for node in machine.nodes] == [
        ((0, 1), 2 << 20, 1 << 20),
        ((2, 3), 2 << 20, 1 << 20),
    ]
    assert machine.memory.transparent_huge_pages == "never"


def test_a_system_without_proc_and_sys_still_answers(tmp_path: Path) -> None:
    machine = examine_machine(environment(), tmp_path)
    assert machine.cpu.cores >= 1
    assert machine.cpu.sockets is None
    assert (machine.nodes, machine.memory.transparent_huge_pages) == ((), None)


def test_this_machine_has_cores_and_memory() -> None:
    machine = examine_machine(environment())
    assert 1 <= machine.cpu.usable_cores <= len(machine.cpu.cpus) <= machine.cpu.machine_cpus
    assert 0 < machine.memory.available <= machine.memory.total


def test_processors_are_named_on_x86_and_arm() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Fast 9000\n") == "Fast 9000"
    assert cpu_model("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n") == "ARM implementer 0x41, part 0xd40"
    assert cpu_model("") is None


def test_macos_tells_instructions_and_caches() -> None:
    assert sysctl_features(SYSCTL) == {"asimddp", "asimd"}
    assert [(cache.level, cache.size) for cache in sysctl_caches(SYSCTL)] == [(2, 4 << 20)]


def test_sources_name_instruction_sets_by_their_macros() -> None:
    source = "#if defined(__AVX512VNNI__)\n#elif __ARM_FEATURE_DOTPROD\n#endif"
    assert features_in(source) == {"AVX-512 VNNI", "dot products"}


def test_each_instruction_set_belongs_to_one_architecture() -> None:
    assert {*instruction_sets("x86_64"), *instruction_sets("arm64")} == set(INSTRUCTION_SETS)
    assert instruction_sets("riscv64") == ()


def test_what_a_kernel_includes_of_the_shared_headers_counts(tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text("#include <dovetail/numbers.h>\n")
    assert "F16C" in examine_kernel(source).features


def test_a_kernel_that_does_not_compile_is_told(tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int self_test(void) { return missing; }\n#ifdef __AVX2__\n#endif\n")
    kernel = examine_kernel(source)
    assert kernel.problem is not None
    assert kernel.features == {"AVX2"}


def test_load_is_what_others_ran() -> None:
    spent = {"user": 3.0, "system": 0.5, "idle": 4.0, "steal": 0.4, "guest": 3.0}
    load = load_of(spent, own=2.5, seconds=2.0, num_cpus=4)
    assert (load.others, load.steal) == (pytest.approx(1 / 8), pytest.approx(0.05))


def test_load_without_steal_time() -> None:
    assert load_of({"user": 1.0}, own=2.0, seconds=1.0, num_cpus=1).steal is None


def test_a_watch_reads_fractions() -> None:
    load = LoadWatch((0,)).read()
    assert 0 <= load.others <= 1


def test_sizes_are_short() -> None:
    assert [size(value) for value in (512, 512 << 10, 3 << 29, 1 << 30)] == ["512 bytes", "512 KiB", "1.5 GiB", "1 GiB"]
