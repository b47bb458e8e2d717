"""`dovetail generate --lora` and `dovetail chat --lora`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail.commands import load_config
from dovetail.commands.adapters import with_adapter
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.lora import LoRARequest
from dovetail.plugins.commands.chat.command import app as chat
from dovetail.plugins.commands.generate import app as generate
from dovetail.testing.tiny_adapters import save_adapter, save_merged
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

SMALL = ["--max-tokens", "8", "--temperature", "0", "-o", "cache.memory_gib=0.1", "-o", "executor.threads=1"]


@pytest.fixture(scope="module")
def model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny chat model, with two layers."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, tiny_config("llama", num_hidden_layers=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((chat_model / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """Of a higher rank than slots have by default."""
    return save_adapter(model.parent / "pirate", model, seed=1, rank=20)


def test_text_is_that_of_merged_weights(model: Path, adapter: Path) -> None:
    merged, runner = save_merged(model.parent / "merged", model, adapter), CliRunner()
    prompts = ["say it", "again", "--json", *SMALL]
    with_lora = ["--model", str(model), "--lora", str(adapter)]
    expected, found, base = (
        [json.loads(line)["texts"] for line in runner.invoke(generate, [*prompts, *given]).stdout.splitlines()]
        for given in (["--model", str(merged)], with_lora, ["--model", str(model)])
    )
    assert found == expected != base
    streamed = runner.invoke(generate, ["say it", "--model", str(model), "--lora", f"p={adapter}", *SMALL])
    assert streamed.stdout.removesuffix("\n") == found[0][0]
    answers = [
        runner.invoke(chat, [*given, *SMALL], input="say it\n").stdout
        for given in (["--model", str(merged)], with_lora)
    ]
    assert answers[0] == answers[1] != ""


def test_the_config_may_have_adapters_of_its_own(adapter: Path) -> None:
    given = load_config({"lora": {"enabled": True, "max_rank": 8, "modules": {"poet": "/poet"}}})
    assert with_adapter(given, []) == (given, None)
    assert with_adapter(given, ["poet"]) == (given, LoRARequest("poet"))
    layered, request = with_adapter(given, [str(adapter)])
    assert request == LoRARequest("pirate")
    assert layered.config.lora.modules == {"poet": "/poet", "pirate": str(adapter)}
    assert layered.config.lora.max_rank == 8
    assert with_adapter(load_config(), [str(adapter)])[0].config.lora.max_rank == 20


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a={adapter}", "b={adapter}"], "--lora is given 2 times"),
        (["poet={adapter}"], r"lora\.modules .* calls another adapter 'poet'"),
        (["={adapter}"], "give NAME=PATH"),
        (["pirate="], "give NAME=PATH"),
        (["nowhere"], "--lora nowhere: .*nowhere"),
        (["{adapter}/.."], "no adapter_config.json"),
    ],
)
def test_what_is_no_adapter_is_refused_before_the_model_is_read(given: list[str], words: str, adapter: Path) -> None:
    layered = load_config({"lora": {"enabled": True, "modules": {"poet": "/poet"}}})
    with pytest.raises(ConfigError, match=words):
        with_adapter(layered, [text.format(adapter=adapter) for text in given])


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_tiny_model(other, tiny_config("llama", hidden_size=32))
    foreign = save_adapter(tmp_path / "foreign", other, seed=1)
    refused = CliRunner().invoke(generate, ["x", "--model", str(model), "--lora", str(foreign), *SMALL])
    assert isinstance(refused.exception, ConfigError)
    assert "'foreign' cannot be loaded: the adapter does not fit this model" in str(refused.exception)
