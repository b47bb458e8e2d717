"""What explain says of typical configs, word for word: values, origins, choices with every candidate, messages.

A change of words shows up here as a difference to read. Where it is meant: `GOLDEN=write pytest` on this file, and the
difference goes into the commit.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.engine.explanation import as_data, explain
from dovetail.registry.registry import Registry
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

GOLDEN = Path(__file__).parent / "golden"
GIB = 2**30

CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "foreign_names": {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
    },
    "speculation": {
        "speculative": {
            "drafters": {"quick": {"name": "ngram", "num_tokens": 3}, "own": {"name": "draft_model", "path": "MODEL"}},
            "default": "quick",
        }
    },
    "named_parts": {
        "attention": "reference",
        "scheduler": {"name": "priority", "max_num_seqs": 8},
        "model": {"quantization": "q8", "operators": None},
        "telemetry": ["log"],
        "reproducibility": "strict",
    },
    "refused": {"attention": {"name": "sdpa", "block": 3}},
    "accelerator": {"executor": "gpu"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "model"
    save_tiny_model(path, tiny_config("llama"))
    return path


def asked(name: str, directory: Path) -> dict[str, Any]:
    text = json.dumps(CONFIGS[name]).replace("MODEL", str(directory))
    keywords: dict[str, Any] = json.loads(text)
    model = {"path": str(directory), "tokenizer_mode": "none"} | keywords.pop("model", {})
    return {"model": model, "cache": {"memory_gib": 0.25}, **keywords}


def machine(name: str, cpu: Environment) -> Environment:
    if name != "accelerator":
        return cpu
    return replace(cpu, device_type="cuda", devices=(DeviceInfo("a GPU", 80 * GIB, (9, 0)),))


def without_this_place(data: Any, directory: Path) -> str:
    """As JSON, without what another day or folder changes."""
    data["plugin_hash"] = None
    for component in data["components"]:
        component["version"] = None
    return json.dumps(data, indent=1, ensure_ascii=False).replace(str(directory), "MODEL") + "\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_explain_says_what_it_said(
    name: str, directory: Path, registry: Registry, cpu: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    explanation = explain(load_config(keywords=asked(name, directory)), registry, machine(name, cpu))
    said = without_this_place(as_data(explanation), directory)
    file = GOLDEN / f"{name}.json"
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(said, encoding="utf-8")
    assert said == file.read_text(encoding="utf-8")
