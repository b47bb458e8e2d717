"""What is asked of plugins is answered by what they declare, or refused."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from dovetail.contracts.attention import AttentionCapabilities, AttentionNeed
from dovetail.contracts.executor import ExecutorCapabilities, ExecutorNeed
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.model import ModelCapabilities, ModelNeed
from dovetail.contracts.needs import Compared, Informs, among, compared, informs, reasons_against, rules_of, uncovered
from dovetail.contracts.operators import OperatorsCapabilities, OperatorsNeed
from dovetail.contracts.plugin import Environment, Plugin, PluginOptions
from dovetail.contracts.quantization import QuantizationCapabilities, QuantizationNeed
from dovetail.contracts.speculation import AcceptanceCapabilities, AcceptanceNeed, DraftCapabilities, SpeculationNeed

CPU, FLOAT = frozenset({"cpu"}), frozenset({"float32"})


def imported(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return vars(importlib.import_module(module))[name]


def unanswered(need: type[Any], can: Any) -> list[str]:
    """Fields of a need that nothing answers: neither compared with a capability that there is, nor informative."""
    declared = {one.name for one in fields(can)} if can is not None else set()
    found = []
    for name, rule in rules_of(need):
        says_why = isinstance(rule, Informs) and bool(rule.reason)
        if rule is None or (isinstance(rule, Informs) and not says_why):
            found.append(name)
        if isinstance(rule, Compared) and rule.capability not in declared:
            found.append(name)
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.need is not None], ids=str)
def test_every_field_of_every_need_is_answered(kind: Any) -> None:
    need, base = imported(kind.need), imported(kind.base)
    assert rules_of(need), f"{kind.need} is no record of fields"
    assert unanswered(need, base.capabilities) == []


def test_all_needs_are_in_the_table() -> None:
    """A need that a contract defines, and that no kind names, would be walked by nobody."""
    modules = {imported(kind.base).__module__ for kind in KINDS.values()}
    defined = {
        f"{module}:{name}"
        for module in modules
        for name, value in vars(importlib.import_module(module)).items()
        if name.endswith("Need") and value.__module__ == module
    }
    assert defined <= {kind.need for kind in KINDS.values()}


@dataclass(frozen=True, kw_only=True)
class Can:
    colours: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Need:
    colour: str = field(metadata=compared("colours", among, "{name} has {has}, not {asked}: ask for another colour."))
    taste: str = field(default="", metadata=informs("`check` tastes it"))


@dataclass(frozen=True)
class FaultyNeed(Need):
    forgotten: int = 0
    unknown: str = field(default="", metadata=compared("sounds", among, "{name} has {has}, not {asked}."))
    unexplained: str = field(default="", metadata=informs(""))


def test_a_field_that_nothing_answers_is_found() -> None:
    assert unanswered(Need, Can()) == []
    assert unanswered(FaultyNeed, Can()) == ["forgotten", "unknown", "unexplained"]


def model_need(**asked: Any) -> ModelNeed:
    return ModelNeed(**{"config": {}, "tensor_parallel": 1, "device_type": "cpu", "dtype": "float32", **asked})


@pytest.mark.parametrize(
    ("can", "need", "reason"),
    [
        (ExecutorCapabilities(), ExecutorNeed("cpu"), "it declares no device_types, and cpu is asked for"),
        (ExecutorCapabilities(device_types=CPU), ExecutorNeed("cuda"), "it runs on cpu, not on cuda"),
        (
            ExecutorCapabilities(device_types=CPU),
            ExecutorNeed("cpu", tensor_parallel=3),
            "tensor_parallel up to 1, not 3: lower executor.tensor_parallel, or choose",
        ),
        (
            ExecutorCapabilities(device_types=CPU, tensor_parallel=None),
            ExecutorNeed("cpu", tensor_parallel=3, pipeline_parallel=2),
            "pipeline_parallel up to 1, not 2: lower executor.pipeline_parallel",
        ),
        (
            ExecutorCapabilities(device_types=CPU),
            ExecutorNeed("cpu", enforce_eager=True),
            "does not say that it can do without captured graphs: remove executor.enforce_eager",
        ),
        (
            AttentionCapabilities(device_types=CPU),
            AttentionNeed("cpu", "float32", 16, frozenset({64})),
            "declares no dtypes, and float32 is asked for",
        ),
        (
            AttentionCapabilities(device_types=CPU, dtypes=FLOAT),
            AttentionNeed("cpu", "float32", 16, frozenset({64}), sinks=True),
            "it has no attention sinks",
        ),
        (
            AttentionCapabilities(device_types=CPU, dtypes=FLOAT, head_sizes=frozenset({64, 128})),
            AttentionNeed("cpu", "float32", 16, frozenset({64, 96})),
            "serves the head sizes 128, 64; the model has 96.",
        ),
        (
            AttentionCapabilities(device_types=CPU, dtypes=FLOAT, block_size_multiple=32),
            AttentionNeed("cpu", "float32", 16, frozenset({64})),
            "a multiple of 32, not 16; set cache.block_size",
        ),
        (
            AttentionCapabilities(device_types=CPU, dtypes=FLOAT),
            AttentionNeed("cpu", "float32", 16, frozenset({64}), kv_dtype="int8"),
            "in the model's dtype, float32, not in int8; set cache.dtype",
        ),
        (
            AttentionCapabilities(device_types=CPU, dtypes=FLOAT),
            AttentionNeed("cpu", "float32", 16, frozenset({576}), latents=True),
            "it has no multi-head latent attention; choose another backend, or auto",
        ),
        (
            AttentionCapabilities(device_types=CPU, dtypes=FLOAT, kv_dtypes=frozenset({"int8"}), latents=True),
            AttentionNeed("cpu", "float32", 16, frozenset({576}), latents=True, kv_dtype="int8"),
            "pages of latent vectors cannot be int8 yet; set cache.dtype to auto",
        ),
        (ModelCapabilities(), model_need(tensor_parallel=2), "set executor.tensor_parallel to 1"),
        (ModelCapabilities(), model_need(pipeline_parallel=2), "not 2 stages: set executor.pipeline_parallel to 1"),
        (
            ModelCapabilities(tensor_parallel=None),
            model_need(tensor_parallel=2, batch_invariant=True),
            "leave reproducibility at default",
        ),
        (
            QuantizationCapabilities(device_types=CPU),
            QuantizationNeed("cpu", "float32"),
            "declares no dtypes, and float32 is asked for",
        ),
        (
            QuantizationCapabilities(device_types=None, dtypes=None),
            QuantizationNeed("cpu", "float32", batch_invariant=True),
            "choose another method, or leave reproducibility at default",
        ),
        (OperatorsCapabilities(dtypes=FLOAT), OperatorsNeed("cpu", "float32"), "declares no device_types"),
        (
            OperatorsCapabilities(device_types=CPU, dtypes=FLOAT),
            OperatorsNeed("cpu", "float16"),
            "serves the dtypes float32, not float16; set model.dtype",
        ),
        (
            DraftCapabilities(),
            SpeculationNeed("cpu", "float32", 64, 32, tensor_parallel=2, num_tokens=3),
            "up to 1 tensor-parallel rank, not 2: set executor.tensor_parallel to 1",
        ),
        (AcceptanceCapabilities(), AcceptanceNeed("cpu", 64, 3, trees=True), "choose another rule or drafter"),
        (AcceptanceCapabilities(), AcceptanceNeed("cpu", 64, 3, lossless=True), "it is lossy"),
    ],
)
def test_what_is_asked_and_not_declared_is_one_sentence(can: Any, need: Any, reason: str) -> None:
    [answer] = uncovered("it", can, need)
    assert reason in answer
    assert answer.endswith(".")


def test_what_is_declared_is_covered() -> None:
    can = ExecutorCapabilities(device_types=None, tensor_parallel=4, pipeline_parallel=None, enforce_eager=True)
    assert uncovered("it", can, ExecutorNeed("xpu", 4, 8, enforce_eager=True)) == []


def test_check_is_asked_only_about_what_is_covered() -> None:
    class Asked(Plugin):
        capabilities = Can(colours=frozenset({"red"}))

        @classmethod
        def check(cls, need: Need, options: Any, environment: Environment) -> list[str]:
            return [f"no {need.colour} today"]

    environment = Environment("cpu", num_cpus=1, memory_bytes=1)
    for colour, reason in (("red", "no red today"), ("blue", "Asked has red, not blue: ask for another colour.")):
        assert reasons_against(Asked, Need(colour), PluginOptions(), environment) == [reason]
