"""vLLM's names for settings: every engine flag of `vllm serve` 0.8, in its order, then the fields
of `EngineArgs` 0.11 that came later (`dovetail.vllm.settings_later`).

This is data about another project's vocabulary. It is the only file where that vocabulary is tied to names of plugins;
nothing is chosen by it, since the names go through the registry like those of a config file.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.config.foreign_names import VALUE, ForeignName, planned, refused, works
from dovetail.vllm.settings_kv_transfer import KV_TRANSFER
from dovetail.vllm.settings_later import LATER_NAMES
from dovetail.vllm.settings_server import SERVER_NAMES
from dovetail.vllm.settings_speculation import SPECULATION, SPECULATIVE_CONFIG

_VISION = ("models take text only so far", "describe images in the prompt, and leave it out")
_MERGED = "merge the adapter into the weights, and serve the merged model"
_PROMPT_ADAPTER = ("vLLM itself has dropped prompt adapters", "use a prompt prefix, which prefix caching makes cheap")
_TOKENIZER_POOL = (
    "every API process tokenizes, long prompts on threads of its own",
    "set api_server_count for more processes",
)
_NO_REMOTE_CODE = "no code of a model repository is ever run"
_MULTI_STEP = ("overlapping steps is the engine's business, not a setting", "leave it out")
_POOLERS = "a model generates and is pooled as its checkpoint is made"
_SAFETENSORS = "take the checkpoint in safetensors"
_METHODS = "take its unquantized checkpoint with q4, q8, int8 or fp8"
_UNKNOWN_METHODS = {
    **dict.fromkeys(
        ("aqlm", "deepspeedfp", "fbgemm_fp8", "modelopt", "marlin", "gptq_marlin_24", "qqq", "hqq", "quark"),
        f"no kernel here multiplies with such weights; {_METHODS}, or the model's AWQ, GPTQ or GGUF checkpoint",
    ),
    **dict.fromkeys(("tpu_int8", "experts_int8"), "weights in 8 bits are int8, and with 8-bit activations w8a8, here"),
    "ptpc_fp8": "weights and activations in 8-bit floats are fp8 here, with a scale for each row",
    **dict.fromkeys(("neuron_quant", "ipex"), f"it belongs to a device that no executor here runs on; {_METHODS}"),
    "moe_wna16": "AWQ and GPTQ checkpoints are recognized by themselves, with experts too; leave it out",
    "gguf": "GGUF files are recognized by themselves; leave it out",
    "squeezellm": "vLLM itself has dropped SqueezeLLM, and no kernel here multiplies with its lookup tables; "
    "take the model's AWQ, GPTQ or GGUF checkpoint, or its unquantized one with model.quantization: q4",
}

_MODEL = (
    works("model", "str", "model.path"),
    refused("task", "str", _POOLERS, "leave it out, and call what is wanted", "auto", "generate", "embed"),
    works("tokenizer", "str", "model.tokenizer"),
    planned(
        "hf_config_path",
        "str",
        "the config is read from the folder of the weights",
        "change keys of it with hf_overrides, or put it there",
    ),
    works(
        "skip_tokenizer_init",
        "switch",
        "model.tokenizer_mode",
        "sets `none`: token ids in and out",
        values={True: "none"},
        no_effect=(False,),
    ),
    works("revision", "str", "model.revision"),
    refused("code_revision", "str", _NO_REMOTE_CODE, "leave it out; revision is that of the weights"),
    planned(
        "tokenizer_revision",
        "str",
        "the tokenizer comes with the weights, or from a directory",
        "give tokenizer a local directory of that revision",
    ),
    works(
        "tokenizer_mode",
        "str",
        "model.tokenizer_mode",
        refuses={
            "custom": "a tokenizer of your own runs outside the engine: tokenizer_mode none, token ids in and out",
        },
    ),
    refused(
        "trust_remote_code",
        "switch",
        _NO_REMOTE_CODE,
        "wrap the architecture in a model family plugin, or leave it out where the model needs none",
        False,
    ),
    planned("allowed_local_media_path", "str", *_VISION, ""),
    works("download_dir", "str", "model.source.cache_dir", "an option of the model source `hf`"),
    works(
        "load_format",
        "str",
        "model.weight_format.name",
        "any installed weight format",
        refuses={
            "dummy": "no weights are made up; save a small random checkpoint with transformers",
            **dict.fromkeys(("pt", "npcache"), "pickled weights can run code; convert them to safetensors"),
            **dict.fromkeys(
                ("sharded_state", "tensorizer", "runai_streamer", "runai_streamer_sharded"),
                f"that is a format of vLLM's own loaders; {_SAFETENSORS}",
            ),
            "bitsandbytes": "such checkpoints are recognized by themselves; quantization q4 or q8 rounds others",
            "mistral": "take the checkpoint in the form of Hugging Face, which Mistral publishes as well",
        },
    ),
    planned(
        "config_format",
        "str",
        "configs are read as Hugging Face's or from GGUF metadata",
        "take the checkpoint in one of these forms",
        "auto",
        "hf",
    ),
    works("dtype", "str", "model.dtype", values={"half": "float16", "float": "float32"}),
    works(
        "kv_cache_dtype",
        "str",
        "cache.dtype",
        "where the attention backend serves it",
        values={"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"},
    ),
    works("max_model_len", "int", "model.max_model_len"),
    works(
        "guided_decoding_backend",
        "str",
        "grammar.name",
        "`llguidance`, `xgrammar` (an extra), or any installed one",
        values={"guidance": "llguidance"},
        refuses=dict.fromkeys(
            ("outlines", "lm-format-enforcer"), "there is no such plugin here: take llguidance or xgrammar"
        ),
    ),
    refused(
        "logits_processor_pattern",
        "str",
        "requests name no Python classes",
        "name processors in the section logits_processors; requests choose among them",
    ),
    works(
        "model_impl",
        "str",
        "model.family.name",
        "any installed model family",
        refuses={"vllm": "vLLM's model code is not here; name one of `dovetail plugins list`, or leave it out"},
    ),
)

_PARALLEL = (
    works(
        "distributed_executor_backend",
        "str",
        "executor.name",
        "any installed executor",
        values={"mp": "multiproc"},
        refuses={
            "uni": "one worker runs inside the process wherever that suffices; leave it out",
            "external_launcher": "executors start their own workers; give mp, or leave it out",
        },
    ),
    works("pipeline_parallel_size", "int", "executor.pipeline_parallel"),
    works("tensor_parallel_size", "int", "executor.tensor_parallel"),
    planned(
        "max_parallel_loading_workers", "int", "ranks load at once, from memory-mapped files they share", "leave it out"
    ),
    refused(
        "ray_workers_use_nsight",
        "switch",
        "workers are processes without Ray",
        "start the whole command under the profiler, or attach it to a worker",
        False,
    ),
)

_CACHE = (
    works("block_size", "int", "cache.block_size"),
    works("enable_prefix_caching", "switch", "cache.prefix_caching"),
    planned(
        "disable_sliding_window", "switch", "windows are always honoured", "lower max_model_len to the window", False
    ),
    refused("use_v2_block_manager", "switch", "there is one block manager", "leave it out", True, False),
    refused("num_lookahead_slots", "int", "slots for drafts are reserved as drafters need them", "leave it out", 0),
    works("seed", "int", "model.seed"),
    works("swap_space", "float", "cache.swap_gib", "GiB per rank"),
    planned("cpu_offload_gb", "float", "weights stay on the device", "quantize them: quantization q4 or q8", 0),
    works("gpu_memory_utilization", "float", "cache.memory_fraction", "on a CPU: share of host memory for KV blocks"),
    works("num_gpu_blocks_override", "int", "cache.num_blocks"),
)

_SCHEDULER = (
    works("max_num_batched_tokens", "int", "scheduler.max_num_batched_tokens"),
    works("max_num_partial_prefills", "int", "scheduler.max_num_partial_prefills"),
    works("max_long_partial_prefills", "int", "scheduler.max_long_partial_prefills"),
    works("long_prefill_token_threshold", "int", "scheduler.long_prefill_token_threshold"),
    works("max_num_seqs", "int", "scheduler.max_num_seqs"),
    works("max_logprobs", "int", "model.max_logprobs"),
    works(
        "logprobs_mode",
        "str",
        "model.logprobs_mode",
        "`raw_logprobs`, `processed_logprobs`; by request too (`SamplingParams.logprobs_mode`)",
        refuses=dict.fromkeys(
            ("raw_logits", "processed_logits"),
            "logits are not reported: ask for raw_logprobs or processed_logprobs, which differ from them by a constant",
        ),
    ),
    refused(
        "disable_log_stats",
        "switch",
        "measurements go to the sinks that `telemetry` lists, and it lists none by default",
        "for a log and for Prometheus write telemetry: [log, prometheus]",
        True,
    ),
)

_WEIGHTS = (
    works(
        "quantization",
        "str",
        "model.quantization.name",
        "any installed method; the name of a checkpoint's own format (`awq`, `gptq`) only says what it is, "
        "since such checkpoints load by themselves",
        values={"awq_marlin": "awq", "gptq_marlin": "gptq"},
        refuses=_UNKNOWN_METHODS,
        no_effect=("None",),
    ),
    works("rope_scaling", "json", "model.hf_overrides.rope_scaling"),
    works("rope_theta", "float", "model.hf_overrides.rope_theta"),
    works("hf_overrides", "json", "model.hf_overrides", "a mapping; functions are refused"),
    works("enforce_eager", "switch", "executor.enforce_eager"),
    refused(
        "max_seq_len_to_capture",
        "int",
        "graphs are captured by number of requests, for every length",
        "set executor.cuda_graphs of executor gpu",
        8192,
    ),
    refused("disable_custom_all_reduce", "switch", "there is only torch.distributed's", "leave it out", True, False),
    refused("tokenizer_pool_size", "int", *_TOKENIZER_POOL, 0),
    refused("tokenizer_pool_type", "str", *_TOKENIZER_POOL, "ray"),
    refused("tokenizer_pool_extra_config", "json", *_TOKENIZER_POOL),
    planned("limit_mm_per_prompt", "json", *_VISION),
    planned("mm_processor_kwargs", "json", *_VISION),
    planned("disable_mm_preprocessor_cache", "switch", *_VISION, False),
)

_ADAPTERS = (
    works("enable_lora", "switch", "lora.enabled"),
    refused("enable_lora_bias", "switch", "vLLM itself has dropped biases of adapters", _MERGED, False),
    works("max_loras", "int", "lora.max_loras"),
    works("max_lora_rank", "int", "lora.max_rank", "any rank up to 1024"),
    refused("lora_extra_vocab_size", "int", "vLLM itself has dropped tokens that adapters add", _MERGED, 256, 0),
    works("lora_dtype", "str", "lora.dtype", "also `float32`; the model's dtype, or a narrower one"),
    refused("long_lora_scaling_factors", "str", "vLLM itself has dropped LongLoRA", _MERGED),
    works("max_cpu_loras", "int", "lora.max_cpu_loras"),
    refused(
        "fully_sharded_loras",
        "switch",
        "adapters are divided among ranks as the layers are that they change",
        "leave it out",
        False,
    ),
    refused("enable_prompt_adapter", "switch", *_PROMPT_ADAPTER, False),
    refused("max_prompt_adapters", "int", *_PROMPT_ADAPTER, 1),
    refused("max_prompt_adapter_token", "int", *_PROMPT_ADAPTER, 0),
    works("device", "str", "device", "a device type that torch and an executor know"),
    refused("num_scheduler_steps", "int", *_MULTI_STEP, 1),
    refused("multi_step_stream_outputs", "switch", *_MULTI_STEP, True),
    refused(
        "scheduler_delay_factor",
        "float",
        "a delay before prompts is a scheduler's policy",
        "write a scheduler plugin that waits, or leave it out",
        0,
    ),
    works("enable_chunked_prefill", "switch", "scheduler.enable_chunked_prefill"),
)

_REST = (
    refused(
        "model_loader_extra_config",
        "json",
        "a weight format's options are written next to its name",
        "write model.weight_format: {name: ..., option: value}",
    ),
    refused("ignore_patterns", "str", "only the files that a weight format needs are fetched", "leave it out"),
    works(
        "preemption_mode",
        "str",
        "scheduler.preemption_mode",
        "an option of the bundled schedulers",
        refuses={"swap": "requests are swapped wherever cache.swap_gib gives memory; set that, and leave this out"},
    ),
    refused("qlora_adapter_name_or_path", "str", "vLLM itself has dropped it", "merge the adapter into the weights"),
    refused("show_hidden_metrics_for_version", "str", "no metric is hidden", "leave it out"),
    works(
        "otlp_traces_endpoint",
        "str",
        "telemetry",
        "adds the sink `otlp`, with protocol grpc as vLLM has it; a sink of the config keeps its other options",
        sink={"name": "otlp", "endpoint": VALUE, "protocol": "grpc"},
    ),
    refused(
        "collect_detailed_traces",
        "str",
        "each trace of the sink `otlp` has the phases queue, prefill and decode; workers report no spans of their own",
        "leave it out",
    ),
    refused("disable_async_output_proc", "switch", *_MULTI_STEP, False),
    works("scheduling_policy", "str", "scheduler.name", "any installed scheduler"),
    refused(
        "scheduler_cls",
        "str",
        "vLLM's scheduler classes do not speak this contract",
        "derive from dovetail.contracts.scheduler.Scheduler and give scheduling_policy pkg.mod:Class",
    ),
    refused("override_neuron_config", "json", "no executor here runs on Neuron", "leave it out"),
    refused("override_pooler_config", "json", _POOLERS, "name poolers in the section pooling"),
    refused(
        "compilation_config",
        "json",
        "the executor has options of its own for that",
        "write executor: {name: gpu, cuda_graphs: [1, 8, 64], compile: default} or the like",
    ),
    ForeignName(
        "kv_transfer_config",
        "json",
        "works",
        note="sets `kv_connector`; requests name the peer by `kv_transfer_params`, as with vLLM",
        parts={one.name: one for one in KV_TRANSFER},
    ),
    refused(
        "worker_cls",
        "str",
        "workers are built from the chosen plugins",
        "write the plugin that should differ",
        "auto",
    ),
    works(
        "generation_config",
        "str",
        "model.generation_config",
        "`auto`: the checkpoint's own; `vllm` and `none`: none; or a directory that has one",
        values={"vllm": "none"},
    ),
    works("override_generation_config", "json", "model.override_generation_config"),
    refused(
        "enable_sleep_mode",
        "switch",
        "every engine can sleep",
        "call sleep and wake_up of LLM or LLMEngine",
        True,
        False,
    ),
    refused(
        "calculate_kv_scales",
        "switch",
        "8-bit KV caches need no scales from the checkpoint",
        "set kv_cache_dtype alone",
        False,
    ),
    refused(
        "additional_config",
        "json",
        "a plugin's options are written next to its name",
        "write them in its section of the config",
    ),
    SPECULATIVE_CONFIG,
)

VLLM_NAMES: Mapping[str, ForeignName] = {
    name.name: name
    for group in (
        _MODEL,
        _PARALLEL,
        _CACHE,
        _SCHEDULER,
        _WEIGHTS,
        _ADAPTERS,
        SPECULATION,
        _REST,
        LATER_NAMES,
        SERVER_NAMES,
    )
    for name in group
}
"""By keyword, in vLLM's order of flags, later ones at the end."""
