"""The `triton` operator set: its tests run in Triton's interpreter, which has to be chosen before kernels are defined,
so in a process of their own; and its kernels are compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.operators import OperatorsNeed
from dovetail.contracts.plugin import Environment
from dovetail.nn.triton_launch import Launch
from dovetail.plugins.operators.triton.operators import TritonOperators
from dovetail.testing.triton_aot import compile_launch

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton", reason="Triton is not installed (pip install dovetail[triton])")

from dovetail.plugins.operators.triton import aot as operators_aot  # noqa: E402

LAUNCHES = operators_aot.launches()


SMOKE = (
    "(test_rms_norm and shape3) or (add_rms_norm and shape3) or (test_silu_mul and shape3) or "
    "(test_rotate and 7-24-10) or test_accept_chains_draws_nothing or test_draw_at_the_ends or "
    "(test_grouped_linear and counts0) or (test_add_low_rank and three) or test_adapters_in_a_graph or "
    "test_a_sparse_block or test_launches_are_recorded"
)


@pytest.mark.timeout(1500)  # all cases take minutes, the more the busier the machine
@pytest.mark.parametrize(
    ("name", "selection"),
    [
        ("triton_interpreted.py", SMOKE),
        pytest.param("triton_interpreted.py", "test", marks=pytest.mark.kernels),
        pytest.param("chains_interpreted.py", "test", marks=pytest.mark.kernels),
    ],
)
def test_in_the_interpreter(name: str, selection: str) -> None:
    """By default each kernel once, all cases with `make test-kernels`."""
    file = Path(__file__).with_name(name)
    options = ["-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-k", selection, str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_machine_without_a_gpu_is_told() -> None:
    environment = Environment("cpu", num_cpus=2, memory_bytes=2**33)
    options = TritonOperators.Options()
    (reason,) = reasons_against(TritonOperators, OperatorsNeed("cpu", "float32"), options, environment)
    assert "run on cuda" in reason
    (reason,) = reasons_against(TritonOperators, OperatorsNeed("cuda", "float64"), options, environment)
    assert "float64" in reason


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_kernels_compile_for_a_gpu_without_spilling(launch: Launch) -> None:
    """For compute capability 9.0; scripts/aot_operators.py prints the others too."""
    used = compile_launch(launch, 90)
    assert used.stack_bytes <= 16
    assert used.registers <= 255


def test_a_machine_without_a_gpu_does_not_import_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    environment = Environment("cpu", num_cpus=2, memory_bytes=2**33)
    assert reasons_against(TritonOperators, OperatorsNeed("cpu", "float32"), TritonOperators.Options(), environment)
    assert "triton" not in sys.modules
