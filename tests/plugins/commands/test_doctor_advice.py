"""Each piece of advice follows from facts, and does not come without them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dovetail.contracts.plugin import DeviceInfo, Environment, FixableReason
from dovetail.plugins.commands.doctor.advice import advise
from dovetail.plugins.commands.doctor.facts import (
    CPU,
    Advice,
    Alternative,
    Bandwidth,
    Cache,
    Examination,
    Kernel,
    Load,
    Machine,
    Measured,
    Memory,
    Model,
    NUMANode,
    ProductRate,
    Run,
    Software,
    Traffic,
)
from dovetail.plugins.commands.doctor.report import print_report
from dovetail.plugins.commands.doctor.software import examine_gpus

GIB = 1 << 30
MIB = 1 << 20
CPU_8 = CPU("Fast 9000", "x86_64", tuple(range(8)), 8, 8, None, 1, frozenset({"avx2"}))
TRAFFIC = Traffic(GIB, 0, 100, is_exact=True)
MODEL = Model(
    reference="m",
    family="f",
    device="cpu",
    dtype="float32",
    quantization=None,
    executor="cpu",
    tensor_parallel=1,
    threads="8 (OMP_NUM_THREADS)",
    threads_asked=None,
    threads_origin="",
    max_model_len=512,
    num_parameters=10**9,
    weight_bytes=4 * GIB,
    kv_memory=GIB,
    operations_per_token=10**9,
    traffic=TRAFFIC,
    alternatives=(),
)
HEALTHY = Examination(
    machine=Machine(CPU_8, (), (), Memory(16 * GIB, 16 * GIB, 0, "madvise", 0)),
    software=Software("2", "AVX2", 8, True, None, ("/usr/bin/cc",), (Kernel("p/k.c", None, frozenset()),)),
    load=Load(0.0, 0.0, 3.0),
    measured=Measured(
        8,
        "C kernel",
        (Bandwidth(GIB, "memory", 1, 10e9), Bandwidth(GIB, "memory", 8, 30 * GIB)),
        (ProductRate("float32", 1e12), ProductRate("bfloat16", 1e10), ProductRate("int8", None, "none")),
    ),
    model=MODEL,
    run=Run(8, 100, 1 / 25, 64, 0.2),
)


def with_machine(**changes: object) -> Examination:
    return replace(HEALTHY, machine=replace(HEALTHY.machine, **changes))


def with_cpu(**changes: object) -> Examination:
    return with_machine(cpu=replace(CPU_8, **changes))


def with_software(**changes: object) -> Examination:
    return replace(HEALTHY, software=replace(HEALTHY.software, **changes))


def with_model(**changes: object) -> Examination:
    return replace(HEALTHY, model=replace(MODEL, **changes))


def only(facts: Examination) -> Advice:
    advice = advise(facts)
    assert len(advice) == 1, advice
    return advice[0]


def test_a_healthy_machine_needs_nothing() -> None:
    assert advise(HEALTHY) == ()


def test_a_machine_without_a_model_needs_nothing() -> None:
    assert advise(replace(HEALTHY, model=None, run=None)) == ()


def test_roofs_are_bandwidth_over_bytes_and_products_over_operations() -> None:
    assert HEALTHY.roofs() == {"decode": pytest.approx(30), "prefill": pytest.approx(1000)}


@pytest.mark.parametrize(("weights", "where", "roof"), [(1, "L2", 128), (8, "L3", 8), (16, "L3", 4), (17, "memory", 1)])
def test_the_roof_is_that_of_the_smallest_cache_that_holds_what_a_token_reads(
    weights: int, where: str, roof: float
) -> None:
    """Half of a cache is what its rate is measured with."""
    caches = (Cache(2, MIB // 2, 2), Cache(3, 16 * MIB, 1))
    measured = [(MIB // 2, "L2", 128), (8 * MIB, "L3", 64), (GIB, "memory", 17)]
    bandwidths = tuple(Bandwidth(size, name, 2, count * MIB) for size, name, count in measured)
    facts = replace(with_machine(caches=caches), measured=replace(HEALTHY.measured, threads=2, bandwidths=bandwidths))
    traffic = Traffic(weights * MIB, 0, 100, is_exact=True)
    assert facts.fastest_reading(traffic.bytes_per_token).where == where
    assert replace(facts, model=replace(MODEL, traffic=traffic)).roofs()["decode"] == pytest.approx(roof)


def test_a_cache_that_was_not_measured_sets_no_roof() -> None:
    facts = with_machine(caches=(Cache(3, 2 * GIB, 1),))
    assert facts.fastest_reading(GIB).where == "memory"


def test_torchs_products_are_no_roof_for_quantized_weights() -> None:
    facts = with_model(quantization="q8")
    assert set(facts.roofs()) == {"decode"}
    assert facts.torch_prefill_rate() == pytest.approx(1000)
    text = io.StringIO()
    print_report(Console(file=text, width=300), facts, ())
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("prefill ")]
    assert "not known: q8 multiplies in its own way; torch's float32 products, for comparison: 1,000 tok/s" in line
    assert "%" not in line


def test_other_devices_have_no_roof() -> None:
    assert with_model(device="cuda").roofs() == {}


def test_more_threads_than_cores() -> None:
    advice = only(with_model(threads_asked=12, threads_origin="engine.yaml:3"))
    assert advice.severity == "problem"
    assert "8 threads at most" in advice.text
    assert "12" in advice.text
    assert "engine.yaml:3" in advice.text


def test_threads_of_all_ranks_count() -> None:
    assert "16" in only(with_model(threads_asked=8, tensor_parallel=2, threads_origin="-o")).text


def test_threads_from_the_environment() -> None:
    assert "now it is 9, from OMP_NUM_THREADS" in only(with_software(omp_num_threads="9")).text


def test_the_config_goes_before_the_environment() -> None:
    facts = with_model(threads_asked=8, threads_origin="-o")
    assert advise(replace(facts, software=replace(facts.software, omp_num_threads="99"))) == ()


def test_hyper_threads_are_no_cores() -> None:
    facts = with_cpu(cores=4)
    advice = only(replace(facts, model=replace(MODEL, threads_asked=8, threads_origin="-o")))
    assert "4 threads at most" in advice.text
    assert "hyper-threads" in advice.reason


def test_a_quota_counts_as_cores() -> None:
    facts = with_cpu(quota=2)
    advice = only(replace(facts, software=replace(facts.software, omp_num_threads="8")))
    assert "2 threads at most" in advice.text
    assert "control group" in advice.reason


def test_idle_cores() -> None:
    advice = only(with_software(omp_num_threads="2"))
    assert advice.severity == "hint"
    assert "to 8" in advice.text


@pytest.mark.parametrize("text", ["", "many", "0"])
def test_an_environment_that_asks_for_nothing(text: str) -> None:
    assert advise(with_software(omp_num_threads=text)) == ()


def test_a_compiler_is_missing() -> None:
    kernels = (Kernel("p/k.c", "its kernels need a C compiler", frozenset()),)
    advice = only(with_software(compilers=(), kernels=kernels))
    assert "C compiler" in advice.text
    assert "p/k.c" in advice.reason


def test_a_kernel_does_not_compile() -> None:
    advice = only(with_software(kernels=(Kernel("p/k.c", "cc says no", frozenset()),)))
    assert (advice.severity, advice.reason) == ("problem", "cc says no")


def test_gpus_that_are_not_used_are_told_with_the_cause() -> None:
    why = FixableReason("the driver serves CUDA up to 12.2; update the driver")
    machine = Environment("cpu", 8, 16 * GIB, no_devices=why)
    facts = with_software(gpus=examine_gpus(machine))
    advice = only(facts)
    assert (advice.severity, advice.reason) == ("problem", str(why))
    text = io.StringIO()
    print_report(Console(file=text, width=300), facts, ())
    assert f"none: {why}" in text.getvalue()


def test_a_machine_that_has_no_gpu_is_told_why_and_needs_nothing() -> None:
    facts = with_software(gpus=examine_gpus(Environment("cpu", 8, 16 * GIB, no_devices="torch is built without CUDA")))
    assert facts.software.gpus.why_none == "torch is built without CUDA"
    assert advise(facts) == ()


def test_a_triton_that_torch_was_not_built_for_is_told() -> None:
    pytest.importorskip("triton")
    device = DeviceInfo("a GPU", 80 * GIB, (9, 0))
    versions = {"packages": {"torch": "2.11.0", "triton": "3.9.0"}, "torch_pins": {"triton": "3.6.0"}}
    gpus = examine_gpus(Environment("cuda", 8, 16 * GIB, devices=(device,), **versions))
    assert gpus.names == ("a GPU",)
    assert "is built for triton 3.6.0, and 3.9.0 is installed" in only(with_software(gpus=gpus)).reason


def test_smaller_weights_come_with_their_roof_smallest_first() -> None:
    def held(name: str, share: float) -> Alternative:
        return Alternative(name, replace(TRAFFIC, weight_bytes=int(GIB * share)))

    first, second = advise(with_model(alternatives=(held("eight", 0.5), held("same", 0.9), held("four", 0.25))))
    assert "model.quantization=four" in first.text
    assert "4.0x less" in first.text
    assert "120 tok/s instead of 30.0" in first.text
    assert "eight" in second.text


def test_half_precision_without_instructions() -> None:
    advice = only(with_model(dtype="bfloat16"))
    assert "100x slower" in advice.text
    assert "no instructions" in advice.reason


def test_half_precision_that_is_fast() -> None:
    rates = (ProductRate("float32", 1e12), ProductRate("bfloat16", 2e12))
    assert advise(replace(with_model(dtype="bfloat16"), measured=replace(HEALTHY.measured, products=rates))) == ()


def test_a_model_that_does_not_fit() -> None:
    advice = only(with_model(weight_bytes=20 * GIB))
    assert advice.severity == "problem"
    assert "16.00 GiB are available" in advice.reason


def test_a_model_that_hardly_fits() -> None:
    assert only(with_model(weight_bytes=14 * GIB)).severity == "hint"


def test_several_nodes() -> None:
    nodes = (NUMANode(0, (0, 1), GIB, GIB), NUMANode(1, (2, 3), GIB, GIB), NUMANode(2, (), GIB, GIB))
    advice = only(with_machine(nodes=nodes))
    assert "numactl --cpunodebind=0" in advice.text
    assert "tensor_parallel=2" in advice.text


def test_huge_pages_that_are_off() -> None:
    memory = replace(HEALTHY.machine.memory, transparent_huge_pages="never")
    assert "huge pages" in only(with_machine(memory=memory)).text


def test_a_busy_machine() -> None:
    advice = only(replace(HEALTHY, load=Load(0.2, 0.0, 3.0)))
    assert advice.severity == "note"
    assert "20%" in advice.reason
    assert only(replace(HEALTHY, load=Load(0.5, 0.0, 3.0))).severity == "problem"


def test_a_machine_that_is_shared() -> None:
    assert "hypervisor" in only(replace(HEALTHY, load=Load(0.0, 0.2, 3.0))).reason


def test_systems_that_count_no_steal() -> None:
    assert advise(replace(HEALTHY, load=Load(0.0, None, 3.0))) == ()


def test_far_below_the_roof() -> None:
    advice = only(replace(HEALTHY, run=Run(8, 100, 1 / 5, 64, 0.2)))
    assert "200.0 ms, 166.7 ms more" in advice.reason


def test_above_the_roof() -> None:
    assert "Faster than the roof" in only(replace(HEALTHY, run=Run(8, 100, 1 / 40, 64, 0.2))).text


def test_rates_of_a_busy_machine_are_not_compared() -> None:
    facts = replace(HEALTHY, run=Run(8, 100, 1 / 5, 64, 0.2), load=Load(0.5, 0.0, 3.0))
    assert "idle" in only(facts).text


def test_few_threads_that_read_as_fast_as_all() -> None:
    entries = (Bandwidth(GIB, "memory", 4, 30 * GIB), Bandwidth(GIB, "memory", 8, 30 * GIB))
    advice = only(replace(HEALTHY, measured=replace(HEALTHY.measured, bandwidths=entries)))
    assert advice.text.startswith("4 threads read memory as fast as 8")


def test_problems_stand_first() -> None:
    facts = with_model(threads_asked=12, threads_origin="-o")
    facts = replace(facts, load=Load(0.2, 0.0, 3.0))
    facts = replace(facts, machine=with_machine(memory=replace(HEALTHY.machine.memory, available=GIB)).machine)
    assert [advice.severity for advice in advise(facts)] == ["problem", "problem", "note"]
