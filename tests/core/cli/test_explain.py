"""`dovetail explain` and `dovetail config`, and how commands take a configuration."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from dovetail.cli import chat as chat_command
from dovetail.cli import config as config_command
from dovetail.cli import explain as explain_command
from dovetail.cli import generate as generate_command
from dovetail.cli.options import takes_config_option
from dovetail.config.vllm_table import VLLM_NAMES
from dovetail.contracts.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.fixture
def engine_yaml(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.embed_tokens.weight": torch.rand(64, 32)}, model / "model.safetensors")
    path = tmp_path / "engine.yaml"
    path.write_text("device: cpu\nmodel:\n  path: ./model\ncache: {memory_gib: 1}\n")
    return path


def invoke(app: typer.Typer, *arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.chooses_attention
def test_json_has_values_with_origins_decisions_and_estimates(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--json", "--max-model-len", 64, "-o", "scheduler.name=priority")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["values"]["model.max_model_len"] == {"value": 64, "origin": "--max-model-len", "overrides": []}
    assert data["values"]["scheduler.name"]["origin"] == "-o"
    assert data["values"]["cache.memory_gib"]["origin"] == "engine.yaml:4"
    decisions = {decision["key"]: decision for decision in data["decisions"]}
    assert decisions["attention.name"]["candidates"]["sdpa"] == []
    # 2 layers x key and value x 2 heads x size 8 x 4 bytes
    per_token = 2 * 2 * 2 * 8 * 4
    assert data["memory"]["kv_bytes_per_token"] == per_token
    assert data["memory"]["kv_tokens"] == (2**30 // (per_token * 16) - 1) * 16
    # Of the model, of which this checkpoint has a part: embedding and output layer, two layers, the last norm.
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    assert data["memory"]["num_parameters"] == 2048
    assert data["memory"]["weight_bytes"] == 4 * (2 * 64 * 32 + 2 * layer + 32)
    assert data["refused"] is None


def test_text_names_origin_reason_and_candidates(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "-o", "cache.memory_gib=2")
    assert result.exit_code == 0, result.output
    assert "over 1 (engine.yaml:4)" in result.output
    assert "asked auto: the model's own" in result.output
    assert "requests that would be refused" in result.output


def test_weights_are_not_read(engine_yaml):
    weights = engine_yaml.parent / "model" / "model.safetensors"
    whole = weights.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    weights.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))
    assert invoke(explain_command.app, engine_yaml).exit_code == 0


def test_a_refused_config_is_explained_as_far_as_it_goes(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--json", "--max-model-len", 999)
    assert result.exit_code == 2
    data = json.loads(result.stdout)
    assert "max_model_len 999 (--max-model-len) is more than the 128" in data["refused"]
    assert data["values"]["model.dtype"]["value"] == "float32"
    assert data["memory"] is None


def test_a_refusal_comes_first_on_stderr_and_last_on_stdout(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--max-model-len", 999)
    assert result.stderr.startswith("error: model.max_model_len 999")
    assert result.stdout.splitlines()[-1].startswith("refused: model.max_model_len 999")


def test_a_manifest_that_cannot_be_written_is_refused_before_the_report(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--manifest", "/nope/x.json")
    assert isinstance(result.exception, ConfigError)
    assert result.stdout == ""


@pytest.mark.parametrize("app", [explain_command.app, generate_command.app, chat_command.app])
def test_help_prints_every_flag_whole_in_80_columns(app, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(app, "--help")
    flags = [name.flag for name in VLLM_NAMES.values() if name.status == "works"]
    assert [flag for flag in flags if flag not in result.output] == []


def test_a_missing_model_is_no_config_error(engine_yaml):
    assert invoke(explain_command.app, engine_yaml, "--model", "./none").exit_code == 1


def test_a_manifest_is_written(engine_yaml, tmp_path):
    out = tmp_path / "run.json"
    assert invoke(explain_command.app, engine_yaml, "--manifest", out).exit_code == 0
    again = invoke(explain_command.app, out, "--json")
    assert json.loads(again.stdout)["decisions"] == []


def test_flags_that_are_not_taken_answer_with_the_reason(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--trust-remote-code")
    assert isinstance(result.exception, ConfigError)
    assert "no code of a model repository" in str(result.exception)


def test_config_show_merges_without_resolving(engine_yaml):
    result = invoke(config_command.app, "show", engine_yaml, "--no-enable-prefix-caching", "--origins")
    assert 'model.path = "./model"  (engine.yaml:3)' in result.output
    assert "cache.prefix_caching = false  (--no-enable-prefix-caching)" in result.output


def test_config_schema_is_json():
    schema = json.loads(invoke(config_command.app, "schema").stdout)
    assert "scheduler" in schema["properties"]


def test_a_command_of_ones_own_keeps_its_arguments(engine_yaml):
    app = typer.Typer()
    seen: list[Any] = []

    @app.command()
    @takes_config_option
    def run(
        layered: Any, prompts: Annotated[list[str], typer.Argument()], seed: Annotated[int, typer.Option("--seed")] = 0
    ) -> None:
        seen.append((layered.config.model.dtype, layered.config.model.seed, prompts, seed))

    result = invoke(app, "one", "two", "--config", engine_yaml, "--dtype", "half", "--seed", 3)
    assert result.exit_code == 0, result.output
    # The command's own --seed stands in the place of the flag of that name.
    assert seen == [("float16", 0, ["one", "two"], 3)]
