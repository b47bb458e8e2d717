"""What is chosen follows the machine that workers run on, which the executor knows; this process may run elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.engine.explanation import Explanation, explain
from dovetail.registry.registry import Registry

EXECUTOR = '''\
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from dovetail.contracts.executor import Executor, ExecutorCapabilities
from dovetail.contracts.plugin import DeviceInfo, PluginOptions

GPU = DeviceInfo("a far GPU", 80 * 2**30, (9, 0))
MACHINES = {
    "gpu": {"device_type": "cuda", "devices": (GPU,), "num_cpus": 32, "memory_bytes": 64 * 2**30},
    "plain cpu": {"device_type": "cpu", "devices": (), "cpu_features": frozenset()},
    "cpu with bfloat16": {"cpu_features": frozenset({"avx512_bf16"}), "num_cpus": 16, "memory_bytes": 256 * 2**30},
    "small": {"memory_bytes": 2**30},
    "here": {},
}


class Options(PluginOptions):
    machine: Literal["gpu", "plain cpu", "cpu with bfloat16", "small", "here"]


class Far(Executor):
    """Its workers run on the machine that an option names."""

    contract = (1, 0)
    Options = Options
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu", "cuda"}))

    @classmethod
    def environment(cls, options, environment):
        return replace(environment, **MACHINES[options.machine])

    @classmethod
    def check(cls, need, options, environment):
        """It asks for the workers' memory, as executors of clusters do."""
        enough = environment.memory_bytes >= 2 * 2**30
        return [] if enough else [f"its workers have {environment.memory_bytes / 2**30:g} GiB"]

    def start(self): ...
    def execute(self, plan): return Future()
    def call(self, method, *args): return []
    def shutdown(self): ...
'''

Explain = Callable[..., Explanation]


@pytest.fixture
def explain_far(tmp_path: Path, model_dir: Path, registry: Registry, cpu: Environment) -> Explain:
    """Explains a config whose workers run on one of the machines above."""
    path = tmp_path / "far.py"
    path.write_text(EXECUTOR)

    def run(machine: str, here: Environment = cpu, **keywords: Any) -> Explanation:
        executor = {"name": f"{path}:Far", "machine": machine}
        model = {"path": str(model_dir), "tokenizer_mode": "none"}
        return explain(load_config(keywords={"model": model, "executor": executor, **keywords}), registry, here)

    return run


def found(explanation: Explanation, key: str) -> Any:
    [decision] = [decision for decision in explanation.decisions if decision.key == key]
    return decision


@pytest.mark.chooses_attention
def test_kernels_for_the_workers_gpu_are_chosen_by_a_process_that_has_none(explain_far: Explain) -> None:
    far = explain_far("gpu")
    assert far.resolved is not None, far.refusal
    assert far.resolved.device_type == "cuda"
    assert far.resolved.attention.name == "paged_triton"
    assert far.resolved.operators is not None
    assert far.resolved.operators.name == "triton"
    assert dict(found(far, "attention.name").candidates)["paged_cpu"] == ("PagedCPUBackend runs on cpu, not on cuda.",)
    here = explain_far("here")
    assert here.resolved is not None
    assert here.resolved.device_type == "cpu"
    assert dict(found(here, "attention.name").candidates)["paged_triton"] == (
        "PagedTritonBackend runs on cuda, not on cpu.",
    )


@pytest.mark.chooses_attention
def test_prompts_go_through_flashattention_where_it_is_installed(
    explain_far: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.attention_backends.flash.libraries._is_installed", lambda module: True)
    far = explain_far("gpu")
    assert far.resolved is not None, far.refusal
    assert far.resolved.attention.name == "flash_prefill"


@pytest.mark.chooses_attention
def test_strict_is_possible_on_a_gpu(explain_far: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through our kernels, whatever is installed: nothing is known of the libraries' bits."""
    monkeypatch.setattr("dovetail.attention_backends.flash.libraries._is_installed", lambda module: True)
    far = explain_far("gpu", reproducibility="strict")
    assert far.resolved is not None, far.refusal
    assert far.resolved.attention.name == "paged_triton"


@pytest.mark.chooses_attention
def test_a_gpu_here_is_none_of_the_workers(explain_far: Explain, cpu: Environment) -> None:
    with_gpu = replace(cpu, device_type="cuda", devices=(DeviceInfo("a GPU", 2**36, (9, 0)),))
    far = explain_far("plain cpu", here=with_gpu)
    assert far.resolved is not None, far.refusal
    assert far.resolved.device_type == "cpu"
    reasons = dict(found(far, "attention.name").candidates)["paged_triton"]
    assert reasons == ("PagedTritonBackend runs on cuda, not on cpu.",)


def test_the_dtype_is_what_the_workers_processors_multiply(explain_far: Explain) -> None:
    dtypes = {machine: found(explain_far(machine), "model.dtype") for machine in ("here", "cpu with bfloat16")}
    assert {machine: decision.got for machine, decision in dtypes.items()} == {
        "here": "float32",
        "cpu with bfloat16": "bfloat16",
    }
    assert dtypes["cpu with bfloat16"].reason == "the model's own; this CPU has instructions for bfloat16"


def test_memory_is_the_workers(explain_far: Explain) -> None:
    """8 GiB here hold no more than 3.2 GiB of pages."""
    assert found(explain_far("cpu with bfloat16"), "cache.memory_gib").got == 4
    assert found(explain_far("here"), "cache.memory_gib").got < 4


def test_explain_says_that_the_workers_machine_is_another(explain_far: Explain) -> None:
    reason = found(explain_far("gpu"), "executor.name").reason
    assert reason == ("its workers run on another machine (32 CPUs, 64.0 GiB, a far GPU), for which all else is chosen")
    assert not [decision for decision in explain_far("here").decisions if decision.key == "executor.name"]


def test_an_executors_own_check_sees_its_workers_machine(explain_far: Explain) -> None:
    refusal = explain_far("small").refusal
    assert isinstance(refusal, ConfigError)
    assert "its workers have 1 GiB" in str(refusal)


def test_a_device_that_only_the_workers_have_can_be_named(explain_far: Explain) -> None:
    far = explain_far("gpu", device="cuda").resolved
    assert far is not None
    assert far.device_type == "cuda"
    assert "device 'cuda' (keyword): torch sees no such device" in str(explain_far("plain cpu", device="cuda").refusal)
