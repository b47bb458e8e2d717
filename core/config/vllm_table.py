"""The table behind `dovetail.config.vllm_names`: every engine flag of `vllm serve` 0.8, in its order.

This is data about another project's vocabulary. It is the one place where that vocabulary is tied to names of
plugins; nothing is chosen by it, since the names go through the registry like those of a config file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.vllm_names import Status, ValueType, VLLMName

_VISION = "models take text only; multimodal input comes with multimodal model families"
_LORA = "adapters come with LoRA serving; merge the adapter into the weights until then"
_PROMPT_ADAPTER = "vLLM itself has dropped prompt adapters; use a prompt prefix, which prefix caching makes cheap"
_TOKENIZER_POOL = "prompts are tokenized once, in the engine's process; leave it out"
_MULTI_STEP = "overlapping steps is the engine's business, not a setting; leave it out"
_DRAFT_MODEL = "a draft model is a drafter of the section `speculative`, with its path beside the name"
_ONE_DRAFTER = "speculative.drafters.draft"


def _name(name: str, type_: ValueType, status: Status, note: str = "", key: str | None = None, **more: Any) -> VLLMName:
    return VLLMName(name, type_, status, key, note, **more)


def _works(name: str, type_: ValueType, key: str, note: str = "", **more: Any) -> VLLMName:
    return _name(name, type_, "works", note, key, **more)


def _planned(name: str, type_: ValueType, note: str, *no_effect: Any) -> VLLMName:
    return _name(name, type_, "planned", note, no_effect=no_effect)


def _refused(name: str, type_: ValueType, note: str, *no_effect: Any) -> VLLMName:
    return _name(name, type_, "refused", note, no_effect=no_effect)


_MODEL = (
    _works("model", "str", "model.path"),
    _planned("task", "str", "only text generation is served so far", "auto", "generate"),
    _works("tokenizer", "str", "model.tokenizer"),
    _planned(
        "hf_config_path", "str", "the config is read beside the weights; change keys of it with model.hf_overrides"
    ),
    _works(
        "skip_tokenizer_init",
        "switch",
        "model.tokenizer_mode",
        "sets `none`: token ids in and out",
        values={True: "none"},
        no_effect=(False,),
    ),
    _works("revision", "str", "model.revision"),
    _refused("code_revision", "str", "no code of a model repository is ever run"),
    _planned("tokenizer_revision", "str", "give model.tokenizer a local directory of that revision"),
    _works(
        "tokenizer_mode",
        "str",
        "model.tokenizer_mode",
        refuses={
            "mistral": "tokenizers are read through Hugging Face transformers; use a checkpoint with tokenizer.json",
            "custom": "a tokenizer of your own goes beside the engine: tokenizer_mode none, token ids in and out",
        },
    ),
    _refused(
        "trust_remote_code",
        "switch",
        "no code of a model repository is ever run; wrap the architecture in a model family plugin",
        False,
    ),
    _planned("allowed_local_media_path", "str", _VISION, ""),
    _works("download_dir", "str", "model.source.cache_dir", "an option of the model source `hf`"),
    _works(
        "load_format",
        "str",
        "model.weight_format.name",
        "any installed weight format",
        refuses={"dummy": "random weights are for tests; make a small random checkpoint instead"},
    ),
    _planned("config_format", "str", "configs are read as Hugging Face's or from GGUF metadata", "auto", "hf"),
    _works("dtype", "str", "model.dtype", values={"half": "float16", "float": "float32"}),
    _works(
        "kv_cache_dtype",
        "str",
        "cache.dtype",
        "where the attention backend serves it",
        values={"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"},
    ),
    _works("max_model_len", "int", "model.max_model_len"),
    _planned("guided_decoding_backend", "str", "grammars come with structured output", "auto", "xgrammar"),
    _refused("logits_processor_pattern", "str", "only processors that the config names under logits_processors run"),
    _works(
        "model_impl",
        "str",
        "model.family.name",
        "any installed model family",
        refuses={"vllm": "name one of this project's families, or leave it out"},
    ),
)

_PARALLEL = (
    _works(
        "distributed_executor_backend",
        "str",
        "executor.name",
        "any installed executor",
        values={"mp": "multiproc"},
        refuses={
            "uni": "one worker runs inside the process wherever that suffices; leave it out",
            "external_launcher": "executors start their own workers",
        },
    ),
    _planned("pipeline_parallel_size", "int", "layers are not split over ranks yet; use tensor_parallel_size", 1),
    _works("tensor_parallel_size", "int", "executor.tensor_parallel"),
    _planned("max_parallel_loading_workers", "int", "ranks load at once, from memory-mapped files"),
    _refused("ray_workers_use_nsight", "switch", "profilers attach to worker processes from outside", False),
)

_CACHE = (
    _works("block_size", "int", "cache.block_size"),
    _works("enable_prefix_caching", "on/off", "cache.prefix_caching"),
    _planned(
        "disable_sliding_window", "switch", "windows are always honoured; lower max_model_len to the window", False
    ),
    _refused("use_v2_block_manager", "switch", "there is one block manager; leave it out", True, False),
    _refused("num_lookahead_slots", "int", "room for drafts is reserved as drafters need it; leave it out", 0),
    _works("seed", "int", "model.seed"),
    _works("swap_space", "float", "cache.swap_gib", "GiB per rank"),
    _planned("cpu_offload_gb", "float", "weights stay on the device; quantize with model.quantization", 0),
    _works("gpu_memory_utilization", "float", "cache.memory_fraction", "on a CPU: share of host memory for KV blocks"),
    _works("num_gpu_blocks_override", "int", "cache.num_blocks"),
)

_SCHEDULER = (
    _works("max_num_batched_tokens", "int", "scheduler.max_num_batched_tokens"),
    _works("max_num_partial_prefills", "int", "scheduler.max_num_partial_prefills"),
    _works("max_long_partial_prefills", "int", "scheduler.max_long_partial_prefills"),
    _works("long_prefill_token_threshold", "int", "scheduler.long_prefill_token_threshold"),
    _works("max_num_seqs", "int", "scheduler.max_num_seqs"),
    _works("max_logprobs", "int", "model.max_logprobs"),
    _refused(
        "disable_log_stats",
        "switch",
        "measurements go to the sinks that `telemetry` lists, and it lists none by default; for a log write telemetry: "
        "[log]",
        True,
    ),
)

_WEIGHTS = (
    _works(
        "quantization",
        "str",
        "model.quantization.name",
        "any installed quantization method",
        refuses={"gguf": "GGUF files are recognized by themselves; leave it out"},
        no_effect=("None",),
    ),
    _works("rope_scaling", "json", "model.hf_overrides.rope_scaling"),
    _works("rope_theta", "float", "model.hf_overrides.rope_theta"),
    _works("hf_overrides", "json", "model.hf_overrides", "a mapping; functions are refused"),
    _works("enforce_eager", "switch", "executor.enforce_eager"),
    _refused(
        "max_seq_len_to_capture",
        "int",
        "graphs are captured by number of requests, for every length: executor.cuda_graphs of executor gpu",
        8192,
    ),
    _planned("disable_custom_all_reduce", "switch", "there is only torch.distributed's all-reduce so far", True, False),
    _refused("tokenizer_pool_size", "int", _TOKENIZER_POOL, 0),
    _refused("tokenizer_pool_type", "str", _TOKENIZER_POOL, "ray"),
    _refused("tokenizer_pool_extra_config", "json", _TOKENIZER_POOL),
    _planned("limit_mm_per_prompt", "json", _VISION),
    _planned("mm_processor_kwargs", "json", _VISION),
    _planned("disable_mm_preprocessor_cache", "switch", _VISION, False),
)

_ADAPTERS = (
    _planned("enable_lora", "switch", _LORA, False),
    _planned("enable_lora_bias", "switch", _LORA, False),
    _planned("max_loras", "int", _LORA, 1),
    _planned("max_lora_rank", "int", _LORA, 16),
    _planned("lora_extra_vocab_size", "int", _LORA, 256),
    _planned("lora_dtype", "str", _LORA, "auto"),
    _planned("long_lora_scaling_factors", "str", _LORA),
    _planned("max_cpu_loras", "int", _LORA),
    _planned("fully_sharded_loras", "switch", _LORA, False),
    _refused("enable_prompt_adapter", "switch", _PROMPT_ADAPTER, False),
    _refused("max_prompt_adapters", "int", _PROMPT_ADAPTER, 1),
    _refused("max_prompt_adapter_token", "int", _PROMPT_ADAPTER, 0),
    _works("device", "str", "device", "a device type that torch and an executor know"),
    _refused("num_scheduler_steps", "int", _MULTI_STEP, 1),
    _refused("multi_step_stream_outputs", "switch", _MULTI_STEP, True),
    _refused("scheduler_delay_factor", "float", "a delay before prompts is a scheduler's policy: write a plugin", 0),
    _works("enable_chunked_prefill", "on/off", "scheduler.enable_chunked_prefill", "as a flag it takes no value"),
)

_SPECULATION = (
    _works(
        "speculative_model",
        "str",
        f"{_ONE_DRAFTER}.name",
        f"the name of a draft worker; {_DRAFT_MODEL}",
        values={"[ngram]": "ngram"},
    ),
    _works("speculative_model_quantization", "str", f"{_ONE_DRAFTER}.quantization", "an option of `draft_model`"),
    _works("num_speculative_tokens", "int", f"{_ONE_DRAFTER}.num_tokens"),
    _refused("speculative_disable_mqa_scorer", "switch", "drafts are always verified in one pass", False),
    _refused("speculative_draft_tensor_parallel_size", "int", "draft models run on one rank, whatever the target's", 1),
    _refused(
        "speculative_max_model_len", "int", "a draft model drafts as far as its own positions and the target's go"
    ),
    _works(
        "speculative_disable_by_batch_size",
        "int",
        "speculative.disable_by_batch_size",
        "counts the requests of a step; by default drafting turns itself down where it does not pay",
    ),
    _works("ngram_prompt_lookup_max", "int", f"{_ONE_DRAFTER}.max_match", "an option of the n-gram drafter"),
    _works("ngram_prompt_lookup_min", "int", f"{_ONE_DRAFTER}.min_match", "an option of the n-gram drafter"),
    _works(
        "spec_decoding_acceptance_method",
        "str",
        "speculative.acceptance.name",
        "any installed acceptance rule",
        values={"rejection_sampler": "rejection", "typical_acceptance_sampler": "typical"},
    ),
    _works(
        "typical_acceptance_sampler_posterior_threshold",
        "float",
        "speculative.acceptance.epsilon",
        "an option of the rule `typical`",
    ),
    _works(
        "typical_acceptance_sampler_posterior_alpha",
        "float",
        "speculative.acceptance.delta",
        "an option of the rule `typical`",
    ),
    _works(
        "disable_logprobs_during_spec_decoding",
        "on/off",
        "speculative.disable_logprobs",
        "requests that ask for them all the same are refused, not answered without",
    ),
)

_REST = (
    _refused(
        "model_loader_extra_config", "json", "a weight format's options stand beside its name in model.weight_format"
    ),
    _planned("ignore_patterns", "str", "only the files that a weight format needs are fetched"),
    _works(
        "preemption_mode",
        "str",
        "scheduler.preemption_mode",
        "an option of the bundled schedulers",
        refuses={"swap": "requests are swapped wherever cache.swap_gib gives room; set that, and leave this out"},
    ),
    _planned("served_model_name", "str", "comes with the server"),
    _refused("qlora_adapter_name_or_path", "str", "vLLM itself has dropped it; merge the adapter into the weights"),
    _refused("show_hidden_metrics_for_version", "str", "no metric is hidden"),
    _planned("otlp_traces_endpoint", "str", "comes with a telemetry sink for OpenTelemetry"),
    _planned("collect_detailed_traces", "str", "comes with a telemetry sink for OpenTelemetry"),
    _refused("disable_async_output_proc", "switch", "overlap is the engine's business, not a setting", False),
    _works("scheduling_policy", "str", "scheduler.name", "any installed scheduler"),
    _refused(
        "scheduler_cls",
        "str",
        "vLLM's scheduler classes do not speak this contract; derive from dovetail.contracts.scheduler.Scheduler and "
        "write scheduler.name: pkg.mod:Class",
    ),
    _refused("override_neuron_config", "json", "there is no Neuron backend"),
    _planned("override_pooler_config", "json", "only text generation is served so far"),
    _refused(
        "compilation_config",
        "json",
        "write executor: {name: gpu, cuda_graphs: [1, 8, 64], compile: default} or the like",
    ),
    _planned("kv_transfer_config", "json", "KV blocks are not sent between engines yet"),
    _refused(
        "worker_cls", "str", "workers are built from the chosen plugins; write the plugin that should differ", "auto"
    ),
    _planned(
        "generation_config",
        "str",
        "the checkpoint's own is read: end-of-sequence ids, and sampling defaults for requests without SamplingParams; "
        "another one, or none, cannot be named",
        "auto",
    ),
    _planned("override_generation_config", "json", "give sampling defaults as SamplingParams"),
    _refused("enable_sleep_mode", "switch", "every engine can: call sleep and wake_up of LLMEngine", True, False),
    _planned("calculate_kv_scales", "switch", "comes with 8-bit KV caches", False),
    _refused("additional_config", "json", "a plugin's options stand beside its name"),
    _refused("speculative_config", "json", "write it as the section `speculative`, which can hold several drafters"),
)

VLLM_NAMES: Mapping[str, VLLMName] = {
    name.name: name
    for group in (_MODEL, _PARALLEL, _CACHE, _SCHEDULER, _WEIGHTS, _ADAPTERS, _SPECULATION, _REST)
    for name in group
}
"""By keyword, in vLLM's order of flags."""
