"""Plugins that are not bundled: local files, preferences, broken ones, and reasons."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.engine.resolving import resolve
from dovetail.nn.native import loader as native
from dovetail.registry.registry import Registry
from dovetail.testing.local_plugins import write_distribution

SINK = """\
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import TelemetrySink

class Options(PluginOptions):
    every: int = 1
    tags: list[str] = []

class MySink(TelemetrySink):
    contract = (1, 0)
    Options = Options
"""

BACKEND = '''\
from dovetail.contracts.attention import AttentionBackend, AttentionCapabilities

class {name}(AttentionBackend):
    """A backend that only says whether it could."""

    contract = (1, 0)
    preference = {preference}
    capabilities = AttentionCapabilities(device_types=frozenset({{"cpu"}}), dtypes=frozenset({{"float32"}}))

    @classmethod
    def check(cls, need, options, environment):
        {check}

    def kv_cache_shape(self, num_blocks):
        return (num_blocks,)

    def plan(self, batch):
        pass

    def forward(self, layer, query, key, value, kv_cache):
        return query
'''

FAMILY = """
from dovetail.plugins.model_families.llama import LlamaFamily


class Family(LlamaFamily):
    def size(self, config):
        return {returned}
"""

DRAFTER = """
from dovetail.contracts.speculation import KeepsLayers
from dovetail.spec_decode.ngram import NgramDrafter


class Drafter(NgramDrafter, KeepsLayers):
    @classmethod
    def caches(cls, options, need):
        raise KeyError("oops")

    def attention_layers(self):
        return ()
"""

GROUP = "dovetail.attention_backend.v1"


@pytest.fixture
def install_backend(tmp_path, monkeypatch, resolve_tiny):
    """Installs a backend as a distribution; returns a function that resolves with it beside the bundled ones."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    modules = []

    def install(name: str, source: str):
        module = f"{name}_{tmp_path.name}".replace("-", "_")
        modules.append(module)
        points = {GROUP: {name: f"{module}:Backend"}}
        write_distribution(site, f"dist-{name}", entry_points=points, modules={f"{module}.py": source})

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def resolve_anew(model_dir, cpu):
    def run(**keywords):
        keywords = {"model": str(model_dir), **keywords}
        return resolve(load_config(keywords=keywords), Registry.scan(), cpu)

    return run


def backend(check: str, preference: int = 0) -> str:
    return BACKEND.format(name="Backend", preference=preference, check=check)


def test_a_local_file_counts_from_the_config_files_folder(resolve_tiny, make_model, tmp_path, decision):
    make_model()
    (tmp_path / "my_sink.py").write_text(SINK)
    path = tmp_path / "engine.yaml"
    path.write_text("model: ./model\ntelemetry: [{name: './my_sink.py:MySink', every: '3'}]\n")
    resolved = resolve_tiny(path)
    [sink] = resolved.telemetry
    reference = f"{tmp_path}/my_sink.py:MySink"
    assert (sink.reference, sink.distribution, sink.options["every"]) == (reference, None, 3)
    assert decision(resolved, "telemetry.0.name").got == reference
    assert decision(resolved, "telemetry.0.every").asked == "3"


@pytest.mark.chooses_attention
def test_a_candidate_of_higher_preference_is_chosen(install_backend, resolve_anew, decision):
    install_backend("better", backend("return []", preference=20))
    found = decision(resolve_anew(), "attention.name")
    assert found.got == "better"
    names = [name for name, _ in found.candidates]
    assert (names[0], names[-1]) == ("better", "reference")
    assert "sdpa" in names


@pytest.mark.chooses_attention
def test_a_candidates_reasons_are_kept(install_backend, resolve_anew, decision):
    install_backend("better", backend("return ['it needs water', 'and salt']", preference=20))
    found = decision(resolve_anew(), "attention.name")
    assert found.got not in ("better", "reference")
    assert dict(found.candidates)["better"] == ("it needs water", "and salt")


def test_a_named_candidates_reasons_are_an_error(install_backend, resolve_anew):
    install_backend("better", backend("return ['it needs water', 'and salt']"))
    with pytest.raises(ConfigError, match=r"'better' cannot be used here:\n  - it needs water\n  - and salt"):
        resolve_anew(attention="better")


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        ("raise KeyError('oops')", "KeyError: 'oops'"),
        ("yield 'no water'", r"TypeError: Backend\.check returned <generator .*: return a list of sentences"),
        ("return None", r"TypeError: Backend\.check returned None: return a list of sentences"),
        ("return 'no water'", r"TypeError: Backend\.check returned 'no water': return a list of sentences"),
        ("return [1]", r"TypeError: Backend\.check returned \[1\]: return a list of sentences"),
    ],
)
def test_a_named_plugin_whose_check_is_at_fault_is_named_with_its_key(install_backend, resolve_anew, check, problem):
    install_backend("better", backend(check))
    with pytest.raises(PluginError, match=rf"^attention\.name \(.*\): attention_backend 'better': .*check.* {problem}"):
        resolve_anew(attention="better")


@pytest.mark.parametrize("returned", ["config['oops']", "None", "7"])
def test_a_family_whose_size_is_at_fault_is_named_with_its_key(returned, resolve_tiny, tmp_path):
    (tmp_path / "families.py").write_text(FAMILY.format(returned=returned))
    name = f"{tmp_path}/families.py:Family"
    with pytest.raises(
        PluginError, match=r"^model\.family\.name \(.*\): model_family '.*:Family': its size failed"
    ) as caught:
        resolve_tiny(model={"family": name})
    assert isinstance(caught.value.__cause__, KeyError | TypeError)


def test_a_drafter_whose_caches_are_at_fault_is_named_with_its_key(resolve_tiny, tmp_path):
    (tmp_path / "drafters.py").write_text(DRAFTER)
    drafters = {"mine": {"name": f"{tmp_path}/drafters.py:Drafter", "num_tokens": 2}}
    key = r"^speculative\.drafters\.mine\.name \(.*\): "
    with pytest.raises(PluginError, match=rf"{key}draft_worker '.*:Drafter': its caches failed with KeyError: 'oops'"):
        resolve_tiny(speculative={"drafters": drafters})


@pytest.mark.chooses_attention
@pytest.mark.parametrize(
    ("source", "problem"),
    [("raise RuntimeError('no driver')", "no driver"), (backend("return 1 / 0", preference=20), "ZeroDivisionError")],
)
def test_a_broken_candidate_costs_a_warning(install_backend, resolve_anew, decision, caplog, source, problem):
    install_backend("broken", source)
    resolved = resolve_anew()
    assert resolved.attention.name not in ("broken", "reference")
    assert [problem in warning for warning in resolved.warnings] == [True]
    assert problem in caplog.text
    assert problem in dict(decision(resolved, "attention.name").candidates)["broken"][0]


def test_a_broken_plugin_that_is_named_is_an_error(install_backend, resolve_anew):
    install_backend("broken", "raise RuntimeError('no driver')")
    with pytest.raises(PluginError, match=r"attention.name \(keyword\): (?s:.)*no driver(?s:.)*Traceback"):
        resolve_anew(attention="broken")


@pytest.mark.chooses_attention
def test_a_candidate_of_another_contract_is_listed_with_its_refusal(tmp_path, monkeypatch, resolve_anew, decision):
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    write_distribution(site, "future", entry_points={"dovetail.attention_backend.v7": {"later": "later:Backend"}})
    found = decision(resolve_anew(), "attention.name")
    assert found.got not in ("later", "reference")
    assert "contract" in dict(found.candidates)["future:later"][0]


def test_no_candidate_at_all_lists_every_reason(resolve_tiny, cpu):
    with pytest.raises(ConfigError, match=r"executor.name: no executor (?s:.)*- cpu: .*xpu(?s:.)*- multiproc: .*xpu"):
        resolve_tiny(environment=replace(cpu, device_type="xpu"))


def test_options_that_a_higher_layer_made_void_are_a_decision(model_dir, cpu, registry, tmp_path: Path, decision):
    config = {"model": str(model_dir), "scheduler": {"name": "priority", "watermark": 0.1}}
    resolved = resolve(load_config(config, overrides=["scheduler.name=fcfs"]), registry, cpu)
    found = decision(resolved, "scheduler.watermark")
    assert (found.asked, found.got) == (0.1, 0.01)
    assert "'priority'" in found.reason


@pytest.mark.chooses_attention
def test_a_missing_compiler_is_warned_of_once_for_all_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolve_tiny: Any
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path)
    [warning] = resolve_tiny().warnings
    assert "model.operators native, attention paged_cpu: its kernels need a C compiler" in warning
    assert "install gcc or clang" in warning


def test_what_is_not_wanted_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolve_tiny: Any) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path)
    assert resolve_tiny(attention="sdpa", model={"operators": None}).warnings == ()


EXECUTOR = """\
from concurrent.futures import Future

from dovetail.contracts.executor import Executor, ExecutorCapabilities

class OneWorker(Executor):
    contract = (1, 0)
    {capabilities}

    def start(self): ...
    def execute(self, plan): return Future()
    def call(self, method, *args): return []
    def shutdown(self): ...
"""
ON_CPUS = 'capabilities = ExecutorCapabilities(device_types=frozenset({"cpu"}))'


@pytest.fixture
def resolve_over(tmp_path, resolve_tiny):
    """Resolves with an executor of a third party that has no `check`."""

    def run(capabilities: str, **options: Any):
        (tmp_path / "mine.py").write_text(EXECUTOR.format(capabilities=capabilities))
        return resolve_tiny(executor={"name": f"{tmp_path / 'mine.py'}:OneWorker", **options})

    return run


def test_an_executor_serves_what_it_declares(resolve_over):
    assert resolve_over(ON_CPUS).executor.name.endswith("OneWorker")


def test_an_executor_without_a_check_is_refused_for_ranks_that_it_does_not_declare(resolve_over):
    with pytest.raises(ConfigError, match=r"OneWorker runs tensor_parallel up to 1, not 2: lower executor\.tensor_par"):
        resolve_over(ON_CPUS, tensor_parallel=2)


def test_an_executor_that_declares_nothing_is_refused(resolve_over):
    with pytest.raises(ConfigError, match="OneWorker declares no device_types, and cpu is asked for: choose another"):
        resolve_over("")


def test_a_refusal_names_what_can_be_used_in_its_place(resolve_tiny):
    with pytest.raises(ConfigError, match=r"CPUExecutor runs (?s:.)*\nWhat can be used here: multiproc, or auto\."):
        resolve_tiny(executor={"name": "cpu", "tensor_parallel": 2})


def test_anothers_name_for_the_model_is_the_drafters_path_in_its_section(resolve_tiny: Any) -> None:
    """vLLM's speculative_config has "model"; `model.path` is the target's."""
    drafters = {"small": {"name": "draft_model", "model": "./small"}}
    with pytest.raises(ConfigError, match=r"unknown key 'speculative\.drafters\.small\.model' .*\.small\.path here$"):
        resolve_tiny(speculative={"drafters": drafters})
