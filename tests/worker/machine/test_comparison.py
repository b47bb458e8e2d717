"""Machines are compared before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.engine.resolving.rules import resolve
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.machine.comparison import MachineFacts, differences, machine_facts


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, tiny_config("llama"))
    return resolve(load_config({"model": {"path": str(path), "tokenizer_mode": "none"}}))


def plugin(version: str | None, digest: str) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, plugins=facts.plugins | {"dovetail": (version, digest)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (plugin(None, ""), 'dovetail is not there: pip install "dovetail=='),
        (plugin("9.9", "0" * 64), "dovetail 9.9 is there, and "),
        (
            lambda facts: replace(facts, models={path: {} for path in facts.models}),
            "is not there: copy it to the same path",
        ),
        (lambda facts: replace(facts, cpu_features=facts.cpu_features - {"avx2", "asimd"}), "its processor lacks "),
    ],
    ids=["no plugin", "another version", "no model", "another processor"],
)
def test_what_a_machine_lacks_is_named(
    config: ResolvedConfig, change: Callable[[MachineFacts], MachineFacts], said: str
) -> None:
    mine = machine_facts(config)
    assert differences(mine, mine, "cpu") == []
    (reason,) = differences(mine, change(mine), "cpu")
    assert said in reason


def test_other_files_of_the_same_version_are_named(config: ResolvedConfig) -> None:
    mine = machine_facts(config)
    version, _ = mine.plugins["dovetail"]
    (reason,) = differences(mine, plugin(version, "0" * 64)(mine), "cpu")
    assert f"dovetail {version} has other files there (000000000000, here" in reason


def test_one_other_byte_of_a_small_model_is_seen_and_a_torn_file(config: ResolvedConfig) -> None:
    (file,) = Path(config.model.files.path).glob("*.safetensors")
    mine, whole = machine_facts(config), file.read_bytes()
    for changed in (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], whole[: len(whole) // 2]):
        file.write_bytes(changed)
        (reason,) = differences(mine, machine_facts(config), "cpu")
        assert f"has other files there: {file.name}" in reason
    file.write_bytes(whole)
