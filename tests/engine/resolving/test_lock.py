"""A lock says what a run is made of: equal runs give equal bytes, and any difference is named."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.locking import (
    Lock,
    compare_locks,
    compare_with_machine,
    not_as_installed,
    read_lock,
    take_lock,
    write_lock,
)
from dovetail.engine.resolving import resolve
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

SINK = """
from dovetail.contracts.telemetry import TelemetrySink

class Sink(TelemetrySink):
    contract = (1, 0)
"""
POINTS = {"dovetail.telemetry_sink.v1": {"acme": "acme.sink:Sink"}}
MODULES = {"acme/__init__.py": "", "acme/sink.py": SINK, "acme/other.py": "A = 1\n"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The distribution acme 1.0 with a sink, installed."""
    folder = tmp_path / "site"
    write_distribution(folder, "acme", entry_points=POINTS, modules=MODULES)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.fixture
def run(site: Path, make_model: Callable[..., Path], cpu: Any) -> Callable[..., ResolvedConfig]:
    """Resolves a run with the sink of acme."""
    model = make_model()

    def make(**sections: Any) -> ResolvedConfig:
        chosen = {"model": {"path": str(model)}, "telemetry": ["acme"], "attention": "reference"} | sections
        return resolve(load_config(None, keywords=chosen), Registry.scan(), cpu)

    return make


def told(lock: Lock, resolved: ResolvedConfig | None = None) -> list[str]:
    return [str(one) for one in compare_with_machine(lock, resolved) if not one.is_informative]


def test_two_locks_of_one_run_have_the_same_bytes_and_name_every_part(run, tmp_path):
    for name in ("first.lock", "second.lock"):
        write_lock(take_lock(run()), tmp_path / name)
    assert (tmp_path / "first.lock").read_bytes() == (tmp_path / "second.lock").read_bytes()
    lock = read_lock(tmp_path / "first.lock")
    assert lock == take_lock(run())
    assert lock.parts.keys() == run().components_by_path().keys()
    part = lock.parts["telemetry.0"]
    assert (part.name, part.distribution, part.contract) == ("acme", "acme", "1.0")
    assert lock.distributions["acme"].files.keys() == {*MODULES, "entry_points.txt"}
    assert "dovetail/contracts/plugin.py" in lock.distributions["dovetail"].files
    assert {"python", "torch"} <= lock.informative.keys()


def test_a_machine_that_is_the_same_is_equal(run):
    assert told(take_lock(run())) == told(take_lock(run()), run()) == []


def test_other_files_of_the_same_version_are_named(run, site):
    lock = take_lock(run())
    (site / "acme" / "other.py").write_text("A = 22\n")
    (site / "acme" / "sink.py").unlink()
    [line] = told(lock)
    files = "acme/other.py, acme/sink.py (missing in this machine)"
    assert line == f"distribution acme: the same version 1.0, and other files: {files}"


def test_another_version_and_a_missing_distribution_are_named(run, site, tmp_path, monkeypatch):
    lock = take_lock(run())
    newer = write_distribution(tmp_path / "newer", "acme", version="1.1", entry_points=POINTS, modules=MODULES)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(newer.parent)
        importlib.invalidate_caches()
        assert told(lock) == ["distribution acme: its version is 1.0 in the lock, 1.1 in this machine"]
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(site)])
    importlib.invalidate_caches()
    assert told(lock) == ["distribution acme: missing in this machine"]


def test_files_that_are_not_as_installed_are_told(run, site):
    info = next(site.glob("*.dist-info"))
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"A = 0\n").digest()).rstrip(b"=").decode()
    text = (info / "RECORD").read_text().replace("acme/other.py,,", f"acme/other.py,sha256={digest},6")
    (info / "RECORD").write_text(text)
    expected = "acme is not as it was installed: acme/other.py was edited; install it again"
    assert not_as_installed(take_lock(run())) == [expected]
    (site / "acme" / "other.py").write_text("A = 0\n")
    assert not_as_installed(take_lock(run())) == []


def test_hooks_that_are_installed_later_are_a_part_more(run, tmp_path, monkeypatch):
    lock = take_lock(run())
    write_distribution(tmp_path / "hooks", "listens", entry_points={"dovetail.hooks.v1": {"mine": "listens"}})
    monkeypatch.syspath_prepend(tmp_path / "hooks")
    importlib.invalidate_caches()
    assert told(lock) == ["part hooks.listens:mine: missing in the lock"]


def test_another_choice_and_another_local_file_are_named(run, tmp_path):
    (tmp_path / "mine.py").write_text(f"import beside\n{SINK}")
    (tmp_path / "beside.py").write_text("B = 1\n")
    lock = take_lock(run(telemetry=[f"{tmp_path}/mine.py:Sink"]))
    assert str(tmp_path) not in str(lock.parts)
    (tmp_path / "beside.py").write_text("B = 22\n")
    other = run(telemetry=[f"{tmp_path}/mine.py:Sink"], scheduler="priority")
    lines = told(lock, other)
    assert "part telemetry.0: other files: beside.py" in lines
    assert "part scheduler: its name is fcfs in the lock, priority in this machine" in lines


def test_another_model_is_told_by_config_tensors_and_files(run, make_model, monkeypatch):
    lock = take_lock(run())
    model = make_model(rope_theta=20000.0)
    lines = told(lock, run())
    assert "model: it has another config" in lines
    assert any(line.startswith("model: its file config.json is sha256 ") for line in lines)
    assert any(line.startswith("model: its file model.safetensors is sha256 ") for line in lines), "random weights"
    assert not any("tensors" in line.replace("safetensors", "") for line in lines)
    # A large file has its size only, unless its content is asked for.
    monkeypatch.setattr("dovetail.engine.locking.lock.SMALL_BYTES", 1000)
    identities = take_lock(run()).models["model"].files
    size = (model / "model.safetensors").stat().st_size
    assert identities["model.safetensors"] == f"size:{size}"
    whole = take_lock(run(), whole_weights=True)
    assert whole.models["model"].files["model.safetensors"].startswith("sha256:")
    assert told(whole, run()) == []


def test_a_config_that_names_a_lock_is_refused_where_it_differs(run, site, tmp_path):
    path = tmp_path / "dovetail.lock"
    write_lock(take_lock(run()), path)
    assert run(lock=str(path)).values["lock"] == str(path)
    (site / "acme" / "other.py").write_text("A = 333\n")
    with pytest.raises(ConfigError) as caught:
        run(lock=str(path), scheduler="priority")
    message = str(caught.value)
    assert message.startswith(f"lock (keyword): this run is not that of {path}:\n")
    assert "acme/other.py" in message
    assert "priority" in message
    assert "`dovetail lock`" in message


def test_the_path_counts_from_its_config_file(run, tmp_path, cpu):
    write_lock(take_lock(run()), tmp_path / "sub.lock")
    chosen = {"model": {"path": run().values["model"]["path"]}, "telemetry": ["acme"], "attention": "reference"}
    (tmp_path / "engine.json").write_text(json.dumps(chosen | {"lock": "sub.lock"}))
    resolved = resolve(load_config(tmp_path / "engine.json"), Registry.scan(), cpu)
    assert resolved.values["lock"] == str(tmp_path / "sub.lock")


def test_two_locks_are_compared_with_values_and_facts_as_information(run):
    first = take_lock(run())
    second = replace(take_lock(run(cache={"block_size": 32})), informative=first.informative | {"torch": "0.1"})
    differences = compare_locks(first, second, ("a", "b"))
    assert all(one.is_informative for one in differences)
    assert "config cache.block_size: 16 in a, 32 in b" in [str(one) for one in differences]
    assert any(one.subject == "torch" and one.what.endswith("0.1 in b") for one in differences)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ("[]", "is no lock"),
        ('{"dovetail_manifest": 1}', "is no lock"),
        ('{"dovetail_lock": 9}', "format 9, this Dovetail reads 1"),
        ('{"dovetail_lock": 1, "parts": 3}', "malformed at 'parts'"),
        ('{"dovetail_lock": 1, "parts": {"attention": {"kind": 3}}}', "malformed at 'parts.attention"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_with_what_to_do(run, tmp_path, text, message):
    path = tmp_path / "bad.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        run(lock=str(path))
    assert "dovetail lock CONFIG --out FILE" in str(caught.value)
