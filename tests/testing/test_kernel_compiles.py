"""`compiled_launches`: an engine whose kernels are compiled for a GPU that is not here, and the cache that it fills."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from dovetail import LLM, SamplingParams
from dovetail.attention_backends.paged_triton import launch, machine
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.triton_mla.backend import TritonMLABackend
from dovetail.attention_backends.triton_mla.launch import LatentLauncher
from dovetail.contracts.device import Graph, Work
from dovetail.executors.gpu.host import HostDevice
from dovetail.nn.kernels import PackedLinear
from dovetail.plugins.operators.triton.operators import TritonOperators
from dovetail.plugins.quantization import int8_kernel
from dovetail.plugins.quantization.int4.method import _Packed
from dovetail.testing.kernel_compiles import CompiledKernel, CompiledLaunches, compiled_launches
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one program may have at compute capability 9.0 (CUDA C programming guide)."""
PAGES = {"paged_triton": 4, "triton_mla": 2}
"""Which argument of a launcher's `write` the pages are."""
PROMPTS = [[5, 9, 33, 70, 12], list(range(3, 43))]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Triton keeps kernels, empty."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The components for GPUs take the null device for one of compute capability 9.0 with one multiprocessor."""
    for backend in (PagedTritonBackend, TritonMLABackend):
        can = replace(backend.capabilities, device_types=frozenset({"cpu"}))
        monkeypatch.setattr(backend, "capabilities", can)
    monkeypatch.setattr(machine, "device_facts", lambda device: (1, 90))
    monkeypatch.setattr(TritonOperators, "check", classmethod(lambda cls, need, options, environment: []))
    # Weights that a processor's oneDNN packs are for CPUs alone.
    monkeypatch.setattr(PackedLinear, "serves", staticmethod(lambda device, dtype: False))


class WatchedGraph(Graph):
    """Notes the kernels that a replay needs and that were not there when it was captured."""

    def __init__(self, graph: Graph, launches: CompiledLaunches, late: list[CompiledKernel]):
        self._graph = graph
        self._launches = launches
        self._late = late
        self._known = launches.kernels

    def replay(self) -> None:
        before = len(self._launches.launches)
        self._graph.replay()
        self._late += [kernel for kernel in self._launches.launches[before:] if kernel not in self._known]


def engine(model: Path, **sections: Any) -> LLM:
    return LLM(
        model={"path": str(model), "tokenizer_mode": "none", "dtype": "bfloat16", "operators": "triton"},
        cache={"block_size": 16, "num_blocks": 12},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 48},
        **sections,
    )


@pytest.mark.parametrize(
    ("model_type", "attention", "launcher", "most"),
    [
        pytest.param("llama", "paged_triton", launch.Launcher, 12, marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", "triton_mla", LatentLauncher, 18, marks=pytest.mark.kernels),
    ],
)
def test_an_engine_compiles_nothing_after_its_warm_up(
    cache: Path,
    as_if_on_a_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    attention: str,
    launcher: Any,
    most: int,
) -> None:
    """Every kernel of a captured step was compiled before the capture, where compiling is not allowed; steps of later
    requests need none that earlier ones did not. All run checked."""
    save_tiny_model(tmp_path / "model", tiny_config(model_type))
    late: list[CompiledKernel] = []
    with compiled_launches(90) as launches:
        capture, write = HostDevice.capture, launcher.write

        def watched(device: HostDevice, work: Work) -> Graph:
            return WatchedGraph(capture(device, work), launches, late)

        def written(self: Any, *arguments: Any) -> Any:
            assert launches.checks is not None
            page = arguments[PAGES[attention]][0]  # of the layer's pages, where tokens that fill up a graph are written
            if all(page.data_ptr() != known.data_ptr() for known in launches.checks.dumps):
                launches.checks.dumps.append(page)
            return write(self, *arguments)

        monkeypatch.setattr(HostDevice, "capture", watched)
        monkeypatch.setattr(launcher, "write", written)
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        drawn = replace(greedy, temperature=0.8, seed=1, top_p=0.9)
        executor = {"name": "gpu", "device": "null", "cuda_graphs": [2]}
        with engine(tmp_path / "model", attention=attention, executor=executor) as llm:
            llm.generate(PROMPTS, [greedy, drawn])
            first = launches.kernels
            llm.generate([[9, 8, 7], list(range(60, 90))], [drawn, greedy])
    assert late == []
    assert launches.kernels == first
    assert launches.compiled == len(first)
    assert max(kernel.shared_bytes for kernel in first) <= SHARED_LIMIT
    assert len(first) <= most


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 112, 128, 129, 250)
HEIGHTS = 4


@pytest.mark.nightly
def test_a_prompt_of_any_length_needs_one_int8_kernel_a_height(cache: Path) -> None:
    weights, scales = torch.zeros(64, 256, dtype=torch.int8), torch.ones(64)
    with compiled_launches(90, execute=False) as launches:
        for num_rows in LENGTHS:
            int8_kernel.multiplied(torch.zeros(num_rows, 256, dtype=torch.bfloat16), weights, scales)
    assert len(launches.kernels) == HEIGHTS


def test_a_prompt_of_any_length_needs_one_int4_kernel_a_height(cache: Path) -> None:
    """Two for the highest tiles, with sums in parts and without; and one that adds up parts."""
    scales, zeros = torch.zeros(2, 16, 64, dtype=torch.float16)
    part = _Packed(torch.zeros(64, 1024, dtype=torch.uint8), scales, zeros, 128)
    with compiled_launches(90, execute=False) as launches:
        for num_rows in LENGTHS:
            part.multiplied(torch.zeros(num_rows, 2048, dtype=torch.bfloat16))
    assert len({kernel.key for kernel in launches.kernels if kernel.name == "int4_linear_kernel"}) == HEIGHTS + 1
    assert len({kernel.key for kernel in launches.kernels if kernel.name == "sum_parts_kernel"}) == 1


KERNELS = """
import sys, torch
from dovetail.testing.kernel_compiles import compiled_launches
from dovetail.plugins.operators.triton.operators import TritonOperators

operators = TritonOperators(TritonOperators.Options())
with compiled_launches(90, execute=False) as launches:
    for rows in (1, 16, 17):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16)
        operators.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6)
        operators.silu_mul(x)
print(launches.compiled, launches.found, len(launches.launches))
"""


def test_a_cache_that_was_carried_has_every_kernel(tmp_path: Path) -> None:
    """Two processes with one cache, which moved: the second compiles nothing, by the path that launches take."""
    settle = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "gpu_check" / "carried.py"))["settle"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    filled, carried = tmp_path / "filled", tmp_path / "carried"
    counts = []
    for folder in (filled, carried):
        environment["TRITON_CACHE_DIR"] = str(folder)
        done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        counts.append(done.stdout.split())
        if folder == filled:
            filled.rename(carried)
            settle(carried.absolute())
    assert counts == [["2", "0", "6"], ["0", "2", "6"]]
