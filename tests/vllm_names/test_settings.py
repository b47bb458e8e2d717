"""vLLM's names: each one does what the table says, and the documentation says what the table says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dovetail.config.load import load_config
from dovetail.config.schema import place_at
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.explanation import explain
from dovetail.vllm import LLM
from dovetail.vllm.settings import VLLM_NAMES
from dovetail.vllm.settings_doc import with_table

REPO = Path(__file__).resolve().parents[2]
FLAGS = (Path(__file__).parent / "serve_flags.txt").read_text().split()
FIELDS = (Path(__file__).parent / "engine_args.txt").read_text().split()
"""Of `EngineArgs` in vLLM 0.11."""


def asked(**keywords):
    layered = load_config(keywords=keywords)
    return {key: value for key, value in layered.asked().items() if layered.origin(key) != "default"}


def test_every_flag_of_vllm_serve_is_covered():
    known = {name.flag for name in VLLM_NAMES.values()} | {name.negative_flag for name in VLLM_NAMES.values()}
    assert set(FLAGS) <= known


def test_the_documentation_is_the_table():
    page = (REPO / "docs" / "from-vllm.md").read_text()
    assert page == with_table(page), "run: python -m dovetail.vllm.settings_doc docs/from-vllm.md"


def test_python_names_in_the_documentation_are_what_classes_have():
    table = (REPO / "docs" / "from-vllm.md").read_text().partition("## Python names")[2]
    for owner in (SamplingParams, RequestOutput, CompletionOutput):
        [row] = [r for r in table.splitlines() if r.startswith(f"| `{owner.__name__}`: ") and "| works" in r]
        names = re.findall(r"`(\w+)`", row.split("|")[1])[1:]
        known = {field.name for field in fields(owner)} | {n for n, v in vars(owner).items() if isinstance(v, property)}
        assert names
        assert set(names) <= known
    fixed = re.findall(r"^\| `SamplingParams\((\w+)=.*\| (?:planned|refused)", table, re.MULTILINE)
    assert fixed
    assert not set(fixed) & {field.name for field in fields(SamplingParams)}
    methods = re.findall(r"`LLM\.(\w+)", "".join(r for r in table.splitlines() if "| works" in r))
    assert methods
    assert set(methods) <= set(dir(LLM))


def test_names_that_are_not_taken_say_why_and_what_to_do():
    every = [part for name in VLLM_NAMES.values() for part in (name, *name.parts.values())]
    assert [name.name for name in every if name.status != "works" and not (name.note and name.instead)] == []


def test_every_field_of_engine_args_is_covered():
    assert [field for field in FIELDS if field not in VLLM_NAMES] == []


def test_names_that_work_have_a_key_in_the_tree():
    parts_of_mappings = VLLM_NAMES["speculative_config"].parts.values()
    for name in [*VLLM_NAMES.values(), *parts_of_mappings]:
        if name.status == "works" and not name.parts:
            for full in (name.key, *name.also, *name.along):
                parts = tuple(full.split("."))
                place = next(p for n in range(len(parts) - 1, -1, -1) if (p := place_at(parts[:n])))
                key = parts[len(place.path)]
                assert key in place.section.model_fields or place.kind is not None, full


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"model": "./dir"}, {"model.path": "./dir"}),
        ({"tensor_parallel_size": 2}, {"executor.tensor_parallel": 2}),
        ({"served_model_name": "m"}, {"server.served_model_name": ["m"]}),
        ({"served_model_name": ["m", "n"]}, {"server.served_model_name": ["m", "n"]}),
        ({"chat_template": "{{ x }}"}, {"model.chat_template": "{{ x }}"}),
        ({"trust_request_chat_template": False}, {"server.request_chat_templates": False}),
        ({"generation_config": "vllm"}, {"model.generation_config": "none"}),
        ({"override_generation_config": '{"top_k": 3}'}, {"model.override_generation_config.top_k": 3}),
        ({"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}, {"dialect.name": "hermes"}),
        (
            {"return_tokens_as_token_ids": True},
            {
                "server.routes.chat.return_tokens_as_token_ids": True,
                "server.routes.completions.return_tokens_as_token_ids": True,
            },
        ),
        (
            {"otlp_traces_endpoint": "http://a:4317"},
            {"telemetry.0.name": "otlp", "telemetry.0.endpoint": "http://a:4317", "telemetry.0.protocol": "grpc"},
        ),
        (
            {"speculative_model": "./small", "num_speculative_tokens": 3},
            {
                "speculative.drafters.draft.name": "draft_model",
                "speculative.drafters.draft.path": "./small",
                "speculative.drafters.draft.num_tokens": 3,
            },
        ),
        ({"port": 80, "api_key": "k"}, {"server.port": 80, "server.api_keys": ["**********"]}),
        ({"ssl_certfile": "c", "ssl_keyfile": "k"}, {"server.tls.certfile": "c", "server.tls.keyfile": "k"}),
        ({"allowed_origins": '["*"]'}, {"server.cors.allow_origins": ["*"]}),
        ({"disable_fastapi_docs": True}, {"server.docs": False}),
        ({"disable_uvicorn_access_log": True}, {"server.access_log": False}),
        ({"dtype": "half"}, {"model.dtype": "float16"}),
        ({"max_model_len": 512}, {"model.max_model_len": 512}),
        ({"enable_prefix_caching": False}, {"cache.prefix_caching": False}),
        ({"swap_space": 4}, {"cache.swap_gib": 4}),
        ({"seed": 7}, {"model.seed": 7}),
        ({"gpu_memory_utilization": 0.8}, {"cache.memory_fraction": 0.8}),
        ({"scheduling_policy": "priority"}, {"scheduler.name": "priority"}),
        ({"distributed_executor_backend": "mp"}, {"executor.name": "multiproc"}),
        ({"distributed_executor_backend": "ray"}, {"executor.name": "ray"}),
        ({"quantization": "int8"}, {"model.quantization.name": "int8"}),
        ({"skip_tokenizer_init": True}, {"model.tokenizer_mode": "none"}),
        ({"rope_theta": 5e5}, {"model.hf_overrides.rope_theta": 5e5}),
        ({"hf_overrides": {"a": {"b": 1}}}, {"model.hf_overrides.a.b": 1}),
        ({"load_format": "safetensors"}, {"model.weight_format.name": "safetensors"}),
        (
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 5,
                "ngram_prompt_lookup_max": 4,
                "ngram_prompt_lookup_min": 2,
            },
            {
                "speculative.drafters.draft.name": "ngram",
                "speculative.drafters.draft.num_tokens": 5,
                "speculative.drafters.draft.max_match": 4,
                "speculative.drafters.draft.min_match": 2,
            },
        ),
        ({"max_model_len": None, "quantization": None}, {}),
        ({"enable_sleep_mode": True, "disable_custom_all_reduce": False}, {}),
        (
            {"enable_lora": True, "max_loras": 4, "max_lora_rank": 32, "max_cpu_loras": 8, "lora_dtype": "bfloat16"},
            {
                "lora.enabled": True,
                "lora.max_loras": 4,
                "lora.max_rank": 32,
                "lora.max_cpu_loras": 8,
                "lora.dtype": "bfloat16",
            },
        ),
        ({"trust_remote_code": False, "decode_context_parallel_size": 1, "fully_sharded_loras": False}, {}),
        ({"enforce_eager": True}, {"executor.enforce_eager": True}),
        ({"device": None, "scheduler": None, "a_name_of_tomorrow": None}, {}),
        ({"operators": None, "speculative": None}, {"speculative": None}),
        ({"kv_cache_memory_bytes": 3 * 2**29}, {"cache.memory_gib": 1.5}),
        ({"logits_processors": []}, {}),
        ({"weight_transfer_config": {"packed": True}}, {"weight_transport.name": "collective"}),
        ({"weight_transfer_config": '{"backend": "ipc"}'}, {"weight_transport.name": "ipc"}),
        (
            {"speculative": "suffix"},
            {"speculative.drafters.draft.name": "suffix", "speculative.default": "draft"},
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "./head", "num_speculative_tokens": 3}},
            {
                "speculative.drafters.draft.name": "eagle",
                "speculative.drafters.draft.path": "./head",
                "speculative.drafters.draft.num_tokens": 3,
            },
        ),
        (
            {"speculative_config": {"model": "./small", "method": None, "draft_tensor_parallel_size": 1}},
            {"speculative.drafters.draft.name": "draft_model", "speculative.drafters.draft.path": "./small"},
        ),
        (
            {"speculative_config": '{"prompt_lookup_max": 3}'},
            {"speculative.drafters.draft.name": "ngram", "speculative.drafters.draft.max_match": 3},
        ),
    ],
)
def test_a_name_sets_its_key(keywords, expected):
    assert asked(**keywords) == expected


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"trust_remote_code": True}, "vLLM name trust_remote_code=True is refused: no code of a model repository"),
        ({"enable_lora_bias": True}, "enable_lora_bias=True is refused: .*merge the adapter"),
        ({"lora_modules": ["a"]}, 'lora_modules: \'a\' must be NAME=PATH, or JSON with "name" and "path"'),
        ({"lora_modules": ["=a"]}, "lora_modules: .* must be NAME=PATH"),
        ({"lora_modules": ['{"name": "a"}']}, "lora_modules: .* must be NAME=PATH"),
        ({"lora_modules": ['{"name": "a"']}, "lora_modules: .* is not JSON"),
        ({"lora_modules": ["a=b", "a=c"]}, "lora_modules: 'a' is given twice: keep one"),
        ({"lora_modules": ['{"name": "a", "path": 5}']}, "lora_modules: path must be text, got 5"),
        ({"lora_modules": ['{"name": "a", "pth": "b"}']}, "lora_modules: unknown key 'pth': did you mean 'path'"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 is planned: .*tensor_parallel_size"),
        ({"scheduler_cls": "a.B"}, "scheduler_cls='a.B' is refused: .*pkg.mod:Class"),
        ({"distributed_executor_backend": "uni"}, "'uni' is refused: .*leave it out"),
        ({"tokenizer_mode": "custom"}, "'custom' is refused"),
        ({"data_parallel_rank": 2}, "data_parallel_rank=2 is planned: .*give data_parallel_size alone"),
        ({"logits_processors": ["a.B"]}, "logits_processors.* is refused: .*section logits_processors"),
        ({"quantization": "squeezellm"}, "'squeezellm' is refused: .*AWQ, GPTQ or GGUF"),
        ({"sliding_window": 128}, "sliding_window=128 is refused: .*hf_overrides="),
        ({"max_paddings": 8}, "max_paddings=8 is refused: no batch is padded"),
        (
            {"use_beam_search": True},
            "use_beam_search=True is refused: beam search is a call of its own; call LLM.beam_search",
        ),
        ({"speculative_config": {"metod": "ngram"}}, "speculative_config: unknown key 'metod': did you mean 'method'"),
        (
            {"speculative_config": {"method": "mtp"}},
            "speculative_config.method='mtp' is refused: no draft worker reads",
        ),
        ({"weight_transfer_config": {"backend": "sparse_nccl"}}, "backend='sparse_nccl' is refused: .*partial=True"),
        ({"speculative_config": 5}, "speculative_config must be a mapping"),
        ({"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}, "dialect.name is given twice: .*keep one"),
        ({"dtype": "int8"}, r"model.dtype: .*\(vLLM name dtype\)"),
    ],
)
def test_what_is_not_taken_is_refused_with_the_reason(keywords, message):
    with pytest.raises(ConfigError, match=message):
        load_config(keywords=keywords)


def test_vllms_names_are_known_as_options_of_a_component_too():
    refusal = explain(load_config({"scheduler": {"max_paddings": 8}})).refusal
    assert "unknown key 'scheduler.max_paddings'" in str(refusal)
    assert "vLLM's max_paddings is refused: no batch is padded" in str(refusal)


def test_adapters_are_added_to_those_of_the_config(tmp_path):
    parent = '{"name": "b.2", "path": "./b", "base_model_name": "org/base"}'
    config = {"lora": {"enabled": True, "modules": {"a": "theirs", "c": "theirs"}}}
    layered = load_config(config, flags={"lora_modules": ["a=ours=1", parent]}, base_dir=tmp_path)
    assert layered.config.lora.modules == {"a": "ours=1", "b.2": "./b", "c": "theirs"}
    assert layered.config.server.routes["models"].options == {"parents": {"b.2": "org/base"}}
    folders = [layered.base_dir(("lora", "modules", name)) for name in ("a", "b.2", "c")]
    assert folders == [Path.cwd(), Path.cwd(), tmp_path]


def test_a_sink_is_added_to_those_of_the_config():
    config = {"telemetry": ["log", {"name": "otlp", "endpoint": "http://a:4318", "protocol": "http/protobuf"}]}
    layered = load_config(config, flags={"otlp_traces_endpoint": "http://b:4318"})
    log, otlp = layered.config.telemetry
    assert log.name == "log"
    assert otlp.options == {"endpoint": "http://b:4318", "protocol": "http/protobuf"}
    assert layered.origin("telemetry.1.endpoint") == "--otlp-traces-endpoint"
    assert layered.origin("telemetry.1.protocol") == "config mapping"
    assert len(load_config({"telemetry": ["log"]}, flags={"otlp_traces_endpoint": "http://b:1"}).config.telemetry) == 2


def test_flags_take_json_and_call_themselves_flags():
    layered = load_config(flags={"rope_scaling": '{"rope_type": "yarn"}', "enable_prefix_caching": False})
    assert layered.config.model.hf_overrides == {"rope_scaling": {"rope_type": "yarn"}}
    assert layered.origin("model.hf_overrides.rope_scaling.rope_type") == "--rope-scaling"
    assert layered.origin("cache.prefix_caching") == "--no-enable-prefix-caching"
    with pytest.raises(ConfigError, match=r"--hf-overrides: '{' is not JSON"):
        load_config(flags={"hf_overrides": "{"})
