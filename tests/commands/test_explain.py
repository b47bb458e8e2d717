"""`dovetail explain` and `dovetail config`, and how commands take a configuration."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from dovetail import LLM
from dovetail.commands.options import takes_config_option
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.joining import write_key
from dovetail.plugins.commands import config as config_command
from dovetail.plugins.commands import explain as explain_command
from dovetail.plugins.commands import generate as generate_command
from dovetail.plugins.commands.chat import command as chat_command
from dovetail.testing.tiny_models import save_tiny_model, tiny_config, tiny_wrapper_config
from dovetail.vllm.settings import VLLM_NAMES

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


def write_model(model):
    """A whole one, with a tokenizer; returns its number of weights."""
    sizes = {key: value for key, value in CONFIG.items() if isinstance(value, int) and key != "eos_token_id"}
    oracle = save_tiny_model(model, tiny_config("llama", **sizes))
    (model / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    return oracle.num_parameters()


@pytest.fixture
def engine_yaml(tmp_path):
    write_model(tmp_path / "model")
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
    num_weights = write_model(engine_yaml.parent / "again")
    assert (data["memory"]["num_parameters"], data["memory"]["weight_bytes"]) == (num_weights, 4 * num_weights)
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


def test_the_last_words_of_a_refusal_are_its_reasons(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "-o", "attention=block_sparse")
    first, reason, others = result.stdout.splitlines()[-3:]
    assert first == "refused: attention.name (-o): 'block_sparse' cannot be used here:"
    assert reason.startswith("  - block_sparse reads only a part of the keys")
    assert others.startswith("What can be used here: ")


FAULTY = """
from dovetail.attention_backends.sdpa import SDPABackend


class Faulty(SDPABackend):
    @classmethod
    def check(cls, need, options, environment):
        raise KeyError("oops")
"""


def test_a_plugin_at_fault_is_a_refusal_without_its_traceback_on_stdout(engine_yaml):
    file = engine_yaml.parent / "faulty.py"
    file.write_text(FAULTY)
    result = invoke(explain_command.app, engine_yaml, "-o", f"attention={file}:Faulty")
    assert result.exit_code == 1
    last = result.stdout.splitlines()[-1]
    assert last.startswith("refused: attention.name (-o): attention_backend ")
    assert last.endswith(f"{file}:Faulty': its check failed with KeyError: 'oops'")
    assert 'raise KeyError("oops")' in result.stderr


def test_the_reasons_of_every_model_family_are_on_stdout(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--tensor-parallel-size", 3)
    refused = result.stdout[result.stdout.rindex("refused: ") :]
    assert "no model family can build it as asked.\nmodel.family.name: no model_family of those" in refused
    assert re.search(r"\n  - llama: .*\n(  - .*\n)*  - transformers: .*: set executor\.tensor_parallel to 1\.", refused)


def test_a_manifest_that_cannot_be_written_is_refused_before_the_report(engine_yaml):
    result = invoke(explain_command.app, engine_yaml, "--manifest", "/nope/x.json")
    assert isinstance(result.exception, ConfigError)
    assert result.stdout == ""


@pytest.mark.parametrize("app", [explain_command.app, generate_command.app, chat_command.app])
def test_help_prints_every_flag_whole_in_80_columns(app, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(app, "--help-all")
    flags = [name.flag for name in VLLM_NAMES.values() if name.status == "works"]
    assert [flag for flag in flags if flag not in result.output] == []


@pytest.mark.parametrize("app", [explain_command.app, generate_command.app, chat_command.app])
def test_help_leaves_out_the_flags_of_vllm_and_says_where_they_are(app):
    result = invoke(app, "--help")
    assert "--help-all" in result.output
    assert "--tensor-parallel-size" not in result.output


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


def change_weights(model, *, without=(), **added):
    tensors = load_file(model / "model.safetensors") | {
        name.replace("__", "."): tensor for name, tensor in added.items()
    }
    save_file({name: tensor for name, tensor in tensors.items() if name not in without}, model / "model.safetensors")


@pytest.mark.parametrize(
    ("without", "added", "words"),
    [
        (["model.layers.1.mlp.up_proj.weight"], {}, r"missing \(1\): model.layers.1.mlp.up_proj.weight"),
        ([], {"model.layers.1.self_attn.q_proj.bias": 32}, r"not expected \(1\): model.layers.1.self_attn.q_proj.bias"),
        ([], {"model.norm.weight": 31}, r"model.norm.weight has shape \[31\]"),
    ],
)
def test_a_checkpoint_that_the_start_refuses_is_refused(engine_yaml, without, added, words):
    tensors = {name: torch.ones(size) for name, size in added.items()}
    change_weights(engine_yaml.parent / "model", without=without, **tensors)
    result = invoke(explain_command.app, engine_yaml)
    assert result.exit_code == 1
    assert re.search(words, result.stderr)


def test_a_tokenizer_that_the_start_refuses_is_refused(engine_yaml):
    model = engine_yaml.parent / "model"
    (model / "tokenizer.json").unlink()
    (model / "vocab.txt").write_text("a")
    auto_map = {"AutoTokenizer": ["tokenization_own.Own", None]}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": auto_map}))
    result = invoke(explain_command.app, engine_yaml)
    assert result.exit_code == 1
    assert "Python code of the checkpoint (tokenization_own.Own), which is never run" in result.stderr


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 32}
REFUSED = {
    "no keywords": ("nemotron", {}, "NemotronAttention does not pass on the keywords"),
    "longrope": (
        "granite",
        {"rope_parameters": LONGROPE},
        "'longrope' rescales positions .* set model.max_model_len to 32 or less",
    ),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "mixes tokens outside of attention"),
    "images": ("llava", {}, "the text model within LlavaForConditionalGeneration is of type 'stablelm'"),
    "an encoder": ("bert", {}, "'bert' is an encoder: .* cannot generate"),
    "a number in words": (
        "mamba2",
        {"time_step_limit": [0.0, {"__float__": "Infinity"}], "head_dim": 32},
        "keeps a recurrent state",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_start_refuses_is_refused_in_the_same_words(name, tmp_path):
    model_type, values, words = REFUSED[name]
    write_headers(tmp_path, model_type, values)
    arguments = ["--model", tmp_path, "-o", "model.tokenizer_mode=none", "-o", "cache.memory_gib=1"]
    explained = invoke(explain_command.app, *arguments)
    assert explained.exit_code == 1
    assert re.search(words, explained.stderr, re.DOTALL)
    config = {"model": {"path": str(tmp_path), "tokenizer_mode": "none"}, "cache": {"memory_gib": 1}}
    with pytest.raises(ModelError, match=f"(?s){words}"):
        LLM(config=config)


def write_headers(directory, model_type, values):
    """A random checkpoint, its config.json written as transformers writes it, but for `values`."""
    given = {key: value for key, value in values.items() if key not in ("time_step_limit", "rope_parameters")}
    if model_type == "mamba2":
        given |= {"num_heads": 4, "state_size": 8, "n_groups": 1}
    config = tiny_wrapper_config(model_type, "stablelm") if model_type == "llava" else tiny_config(model_type, **given)
    save_tiny_model(directory, config)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, **values}))


def test_an_adapter_is_called_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    result = invoke(explain_command.app, "--model", tmp_path)
    assert result.exit_code == 1
    assert "is an adapter (LoRA) for org/base, no model" in result.stderr


def test_an_adapter_beside_a_model_is_warned_of(engine_yaml):
    (engine_yaml.parent / "model" / "adapter_config.json").write_text("{}")
    result = invoke(explain_command.app, engine_yaml, "--json")
    assert result.exit_code == 0, result.output
    assert any(
        "adapter_config.json) beside the model: it is left out" in text
        for text in json.loads(result.stdout)["warnings"]
    )


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_model_in_the_place_of_a_config_hints_at_the_flag(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"GGUF") if path.suffix else path.mkdir()
    result = invoke(explain_command.app, path)
    assert isinstance(result.exception, ConfigError)
    assert f"if this is a model, its place is model.path (--model {path}, model= in Python)" in str(result.exception)


RANKS = (
    "--pipeline-parallel-size",
    2,
    "--tensor-parallel-size",
    2,
    "-o",
    "cache.memory_gib=null",
    "-o",
    "cache.num_blocks=11",
)


def test_every_rank_has_a_row_with_its_place_memory_and_messages(engine_yaml):
    data = json.loads(invoke(explain_command.app, engine_yaml, "--json", *RANKS).stdout)
    rows = [[rank[key] for key in ("rank", "stage", "tensor_rank", "first_layer", "node")] for rank in data["ranks"]]
    here = "this machine"
    assert rows == [[0, 0, 0, 0, here], [1, 0, 1, 0, here], [2, 1, 0, 1, here], [3, 1, 1, 1, here]]
    assert [rank["answers"] for rank in data["ranks"]] == [False, False, True, False]
    # One layer x key and value x one of two heads x size 8 x 4 bytes; ten blocks for requests.
    assert {(rank["kv_bytes_per_token"], rank["kv_bytes"]) for rank in data["ranks"]} == {(64, 10 * 16 * 64)}
    last = {one["kind"]: one for one in data["ranks"][2]["messages"]}
    assert list(last) == ["plan", "receive", "all_reduce", "all_gather", "broadcast", "result"]
    assert last["receive"] == {
        "kind": "receive",
        "count": 1,
        "bytes_per_token": 32 * 4,
        "bytes_per_request": 0,
        "bytes_of_largest_step": 2048 * 32 * 4,
    }
    # Attention and MLP of one layer; half of the vocabulary for each request.
    assert (last["all_reduce"]["count"], last["all_reduce"]["bytes_per_token"]) == (2, 2 * 32 * 4)
    assert (last["all_gather"]["count"], last["all_gather"]["bytes_per_request"]) == (1, 32 * 4)


def test_ranks_have_the_nodes_that_the_config_names(engine_yaml):
    key = engine_yaml.with_name("key")
    write_key(key)
    options = (*RANKS, "-o", "executor.name=joined", "-o", f"executor.key_file={key}")
    named = invoke(explain_command.app, engine_yaml, *options, "-o", "executor.nodes=[left, right]")
    assert named.exit_code == 0, named.output
    assert re.search(r"1 +0 +1 +0 +node left +cpu", named.stdout)
    assert re.search(r"2 +1 +0, answers +1 +node right +cpu", named.stdout)
    assert "plans and results: TCP" in named.stdout
    counted = invoke(explain_command.app, engine_yaml, *options, "-o", "executor.nodes=2", "--json")
    nodes = [rank["node"] for rank in json.loads(counted.stdout)["ranks"]]
    assert nodes == ["a node that joins (1 of 2)"] * 2 + ["a node that joins (2 of 2)"] * 2
