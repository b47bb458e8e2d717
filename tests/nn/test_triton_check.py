"""Whether Triton works, as plugins are told: with Triton missing, broken, and not up to a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from dovetail.contracts.plugin import DeviceInfo, Environment, FixableReason
from dovetail.nn import triton_build
from dovetail.nn.triton_check import reasons_against_triton

PINNED = {"triton": "3.6.0"}


def environment(triton: str = "3.9.0", pins: dict[str, str] = PINNED, capability: tuple[int, int] = (9, 0)):
    device = DeviceInfo("a GPU", 2**36, capability)
    packages = {"torch": "2.11.0", "triton": triton}
    return Environment("cuda", 8, 2**36, devices=(device,), packages=packages, torch_pins=pins)


@pytest.fixture(autouse=True)
def headers(tmp_path, monkeypatch):
    """A compiler and Python.h, whether or not this machine has them."""
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setattr(triton_build, "python_include", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


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


def test_a_machine_without_a_c_compiler_is_told_before_the_first_launch(headers, monkeypatch):
    """As a slim container: kernels compile there, and the module that launches them does not."""
    pytest.importorskip("triton")
    (headers / "gcc").unlink()
    [reason] = reasons_against_triton(environment())
    assert isinstance(reason, FixableReason)
    assert reason.startswith("Triton 3.9.0 builds a small C module at its first launch, and there is no C compiler")
    (headers / "clang").touch(mode=0o755)
    assert reasons_against_triton(environment()) == []
    monkeypatch.setenv("CC", "/opt/cross/cc")
    [reason] = reasons_against_triton(environment())
    assert "no C compiler '/opt/cross/cc', which CC names" in reason


def test_triton_itself_finds_no_compiler_then(headers):
    """The oracle: what Triton would call at its first launch."""
    build = pytest.importorskip("triton.runtime.build")
    if "_find_compiler" not in vars(build):
        pytest.skip("this Triton looks for the compiler amid the build")
    find = build._find_compiler.__wrapped__
    assert find("c") == str(headers / "gcc")
    (headers / "gcc").unlink()
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        find("c")


def test_a_python_without_headers_is_told(headers, monkeypatch):
    pytest.importorskip("triton")
    (headers / "Python.h").unlink()
    [reason] = reasons_against_triton(environment())
    assert f"there is no Python.h in {headers}" in reason
    elsewhere = headers / "include"
    elsewhere.mkdir()
    (elsewhere / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(elsewhere))
    assert reasons_against_triton(environment()) == []


def test_nothing_is_launched_without_a_gpu(headers):
    pytest.importorskip("triton")
    (headers / "gcc").unlink()
    assert reasons_against_triton(Environment("cpu", 8, 2**36, packages={"triton": "3.9.0"})) == []
