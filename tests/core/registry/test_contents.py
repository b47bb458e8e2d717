"""The hash of a plugin's code covers all of it, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.registry import Registry, plugin_hash
from dovetail.registry.contents import distribution_contents, local_contents, module_contents
from dovetail.testing.local_plugins import write_distribution

GROUP = "dovetail.telemetry_sink.v1"
POINTS = {GROUP: {"acme": "acme.sink:Sink"}}
MODULES = {"acme/__init__.py": "", "acme/sink.py": "from acme import other\n", "acme/other.py": "A = 1\n"}


def install_wheel(site: Path) -> Path:
    """As pip leaves it: RECORD has the hash of each file."""
    info = write_distribution(site, "acme", entry_points=POINTS, modules=MODULES)
    lines = []
    for name in MODULES:
        digest = base64.urlsafe_b64encode(hashlib.sha256((site / name).read_bytes()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{(site / name).stat().st_size}\n")
    (info / "RECORD").write_text("".join([*lines, f"{info.name}/RECORD,,\n", "../../bin/acme,,\n"]))
    return info


def install_in_place(site: Path, tree: Path, files: dict[str, str]) -> None:
    """As `pip install -e` leaves it: `files` find the tree."""
    for name, source in MODULES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(source)
    info = write_distribution(site, "acme", entry_points=POINTS, modules=files)
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{tree}", "dir_info": {"editable": True}}))


def test_a_wheel_and_the_tree_that_it_was_built_of_are_equal(site, tmp_path):
    install_wheel(site)
    wheel = distribution_contents("acme")
    assert set(wheel.files) == {*MODULES, "entry_points.txt"}
    assert not wheel.in_place
    for place in ("of_pth", "of_finder"):
        other, tree = tmp_path / place, tmp_path / f"{place}_tree"
        finder = f"MAPPING: dict[str, str] = {{'acme': '{tree}/acme'}}\n"
        files = {
            "of_pth": {"__editable__.acme-1.0.pth": f"{tree}\n"},
            "of_finder": {"__editable__.acme-1.0.pth": "import x", "__editable___acme_1_0_finder.py": finder},
        }
        install_in_place(other, tree, files[place])
        (tree / "acme" / "__pycache__").mkdir()
        (tree / "acme" / "__pycache__" / "sink.cpython-311.pyc").write_bytes(b"compiled")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(other)
            importlib.invalidate_caches()
            in_place = distribution_contents("acme")
        assert in_place.in_place
        assert (in_place.files, in_place.digest) == (wheel.files, wheel.digest)


def test_metadata_that_the_build_left_in_a_source_tree_do_not_hide_the_installation(site, tmp_path, monkeypatch):
    """`python -m` puts the tree on the path, before the installation."""
    install_wheel(site)
    expected = distribution_contents("acme")
    (tmp_path / "tree" / "acme").mkdir(parents=True)
    (tmp_path / "tree" / "acme" / "sink.py").write_text("")
    info = tmp_path / "tree" / "acme.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "SOURCES.txt").write_text("acme/sink.py\n")
    monkeypatch.syspath_prepend(tmp_path / "tree")
    assert distribution_contents("acme").files == expected.files


def test_what_was_edited_or_is_gone_is_named(site):
    install_wheel(site)
    before = distribution_contents("acme")
    assert (before.edited, before.missing) == ((), ())
    (site / "acme" / "other.py").write_text("A = 22\n")
    (site / "acme" / "sink.py").unlink()
    after = distribution_contents("acme")
    assert (after.edited, after.missing) == (("acme/other.py",), ("acme/sink.py",))
    assert after.digest != before.digest


def test_this_installation_of_dovetail_is_covered_with_all_its_packages():
    files = distribution_contents("dovetail").files
    assert {"dovetail/contracts/plugin.py", "dovetail/engine/llm.py", "entry_points.txt"} <= set(files)
    assert files == module_contents("dovetail.contracts.plugin").files


def test_the_hash_of_plugins_sees_every_module_of_the_distribution(site, sink_source):
    modules = MODULES | {"acme/sink.py": sink_source}
    write_distribution(site, "acme", entry_points=POINTS, modules=modules)
    importlib.invalidate_caches()
    component = Registry.scan().component("telemetry_sink", "acme")
    before = plugin_hash([component])
    (site / "acme" / "other.py").write_text("A = 333\n")
    assert plugin_hash([component]) != before


def test_a_local_file_brings_the_files_beside_it_that_it_imports(tmp_path, sink_source):
    (tmp_path / "mine.py").write_text(f"def late():\n    import helper\n{sink_source}")
    (tmp_path / "helper.py").write_text("import parts.inner\nimport mine\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "inner.py").write_text("B = 1\n")
    (tmp_path / "stranger.py").write_text("C = 1\n")
    assert set(local_contents(tmp_path / "mine.py").files) == {"mine.py", "helper.py", "parts/inner.py"}
    component = Registry.scan().component("telemetry_sink", "./mine.py:Sink", base_dir=tmp_path)
    before = plugin_hash([component])
    (tmp_path / "stranger.py").write_text("C = 22\n")
    assert plugin_hash([component]) == before
    (tmp_path / "parts" / "inner.py").write_text("B = 22\n")
    assert plugin_hash([component]) != before


def test_a_local_file_imports_the_file_beside_it_and_never_another_of_its_name(site, tmp_path, sink_source):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "mine.py").write_text(f"from beside_it import NAME\n{sink_source}")
        (folder / "beside_it.py").write_text(f"NAME = {folder.name!r}\n")
    registry = Registry.scan()
    sink = registry.load("telemetry_sink", "./mine.py:Sink", first)
    assert sys.modules[sink.__module__].NAME == "first"
    with pytest.raises(PluginError, match=rf"got {first}/beside_it.py, not {second}/beside_it.py beside it: rename"):
        registry.load("telemetry_sink", "./mine.py:Sink", second)
