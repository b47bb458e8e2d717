"""Whether Triton works, as plugins are told: with Triton missing, broken, and not up to a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from dovetail.contracts.plugin import DeviceInfo, Environment, FixableReason
from dovetail.nn.triton_check import reasons_against_triton

PINNED = {"triton": "3.6.0"}


def environment(triton: str = "3.9.0", pins: dict[str, str] = PINNED, capability: tuple[int, int] = (9, 0)):
    device = DeviceInfo("a GPU", 2**36, capability)
    packages = {"torch": "2.11.0", "triton": triton}
    return Environment("cuda", 8, 2**36, devices=(device,), packages=packages, torch_pins=pins)


def test_a_triton_that_torch_was_not_built_for_and_that_compiles_is_taken():
    pytest.importorskip("triton")
    assert reasons_against_triton(environment()) == []
    assert len(environment().mismatches) == 1


@pytest.mark.parametrize(
    ("pins", "remedy"),
    [(PINNED, "pip install triton==3.6.0, which torch 2.11.0 is built for"), ({}, "'dovetail[triton]'")],
)
def test_one_that_is_missing_is_named(monkeypatch, pins, remedy):
    monkeypatch.setitem(sys.modules, "triton", None)
    [reason] = reasons_against_triton(environment(pins=pins))
    assert isinstance(reason, FixableReason)
    assert reason.startswith("Triton is not installed: ")
    assert remedy in reason


@pytest.mark.parametrize(
    ("installed", "remedy"),
    [("3.1.0", "pip install triton==3.6.0"), ("3.6.0", "pip install --force-reinstall triton==3.6.0")],
)
def test_one_that_cannot_be_imported_is_refused_with_its_error(monkeypatch, installed, remedy):
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    [reason] = reasons_against_triton(environment(installed))
    assert reason.startswith(f"Triton {installed} cannot be imported (ImportError: cannot import name 'knobs'")
    assert remedy in reason


@pytest.mark.parametrize(
    ("installed", "remedy"),
    [
        ("3.1.0", "pip install triton==3.6.0, which torch 2.11.0 is built for."),
        ("3.6.0", "a newer torch, with its Triton, may."),
    ],
)
def test_one_that_cannot_compile_for_the_gpu_is_refused_with_its_error(installed, remedy, capsys):
    """As an old Triton on a GPU that came later."""
    pytest.importorskip("triton")
    [reason] = reasons_against_triton(environment(installed, capability=(19, 0)))
    assert reason.startswith(f"Triton {installed} cannot compile for compute capability 19.0 (")
    assert reason.endswith(remedy)
    assert capsys.readouterr().out == ""
