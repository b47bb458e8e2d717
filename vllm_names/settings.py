"""vLLM's names for settings: every engine flag of `vllm serve` 0.8, in its order, then the fields
of `EngineArgs` 0.11 that came later (`dovetail.vllm.settings_later`).

This is data about another project's vocabulary. It is the only file where that vocabulary is tied to names of plugins;
nothing is chosen by it, since the names go through the registry like those of a config file.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.config.foreign_names import ForeignName, planned, refused, works
from dovetail.vllm.settings_later import LATER_NAMES
from dovetail.vllm.settings_server import SERVER_NAMES

_VISION = "models take text only; multimodal input comes with multimodal model families"
_LORA = "adapters come with LoRA serving; merge the adapter into the weights until then"
_PROMPT_ADAPTER = "vLLM itself has dropped prompt adapters; use a prompt prefix, which prefix caching makes cheap"
_TOKENIZER_POOL = "prompts are tokenized once, in the engine's process; leave it out"
_MULTI_STEP = "overlapping steps is the engine's business, not a setting; leave it out"
_DRAFT_MODEL = "a draft model is a drafter of the section `speculative`, with its path next to the name"
_ONE_DRAFTER = "speculative.drafters.draft"

_MODEL = (
    works("model", "str", "model.path"),
    planned("task", "str", "only text generation is served so far", "auto", "generate"),
    works("tokenizer", "str", "model.tokenizer"),
    planned(
        "hf_config_path",
        "str",
        "the config is read from the folder of the weights; change keys of it with model.hf_overrides",
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
    refused("code_revision", "str", "no code of a model repository is ever run"),
    planned("tokenizer_revision", "str", "give model.tokenizer a local directory of that revision"),
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
        "no code of a model repository is ever run; wrap the architecture in a model family plugin",
        False,
    ),
    planned("allowed_local_media_path", "str", _VISION, ""),
    works("download_dir", "str", "model.source.cache_dir", "an option of the model source `hf`"),
    works(
        "load_format",
        "str",
        "model.weight_format.name",
        "any installed weight format",
        refuses={
            "dummy": "random weights are for tests; make a small random checkpoint instead",
            **dict.fromkeys(("pt", "npcache"), "pickled weights can run code; convert them to safetensors"),
            **dict.fromkeys(
                ("sharded_state", "tensorizer", "runai_streamer", "runai_streamer_sharded"),
                "that is a format of vLLM's own loaders; take the checkpoint in safetensors",
            ),
            "bitsandbytes": "such checkpoints are recognized by themselves; quantization q4 or q8 rounds others",
            "mistral": "take the checkpoint in the form of Hugging Face, which Mistral publishes as well",
        },
    ),
    planned("config_format", "str", "configs are read as Hugging Face's or from GGUF metadata", "auto", "hf"),
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
    refused("logits_processor_pattern", "str", "only processors that the config names under logits_processors run"),
    works(
        "model_impl",
        "str",
        "model.family.name",
        "any installed model family",
        refuses={"vllm": "name one of this project's families, or leave it out"},
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
            "external_launcher": "executors start their own workers",
        },
    ),
    planned("pipeline_parallel_size", "int", "layers are not split over ranks yet; use tensor_parallel_size", 1),
    works("tensor_parallel_size", "int", "executor.tensor_parallel"),
    planned("max_parallel_loading_workers", "int", "ranks load at once, from memory-mapped files"),
    refused("ray_workers_use_nsight", "switch", "profilers attach to worker processes from outside", False),
)

_CACHE = (
    works("block_size", "int", "cache.block_size"),
    works("enable_prefix_caching", "on/off", "cache.prefix_caching"),
    planned(
        "disable_sliding_window", "switch", "windows are always honoured; lower max_model_len to the window", False
    ),
    refused("use_v2_block_manager", "switch", "there is one block manager; leave it out", True, False),
    refused("num_lookahead_slots", "int", "slots for drafts are reserved as drafters need them; leave it out", 0),
    works("seed", "int", "model.seed"),
    works("swap_space", "float", "cache.swap_gib", "GiB per rank"),
    planned("cpu_offload_gb", "float", "weights stay on the device; quantize with model.quantization", 0),
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
    refused(
        "disable_log_stats",
        "switch",
        "measurements go to the sinks that `telemetry` lists, and it lists none by default; for a log and for "
        "Prometheus write telemetry: [log, prometheus]",
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
        refuses={
            "gguf": "GGUF files are recognized by themselves; leave it out",
            "squeezellm": "vLLM itself has dropped SqueezeLLM, and no kernel here multiplies with its lookup tables; "
            "take the model's AWQ, GPTQ or GGUF checkpoint, or its unquantized one with model.quantization: q4",
        },
        no_effect=("None",),
    ),
    works("rope_scaling", "json", "model.hf_overrides.rope_scaling"),
    works("rope_theta", "float", "model.hf_overrides.rope_theta"),
    works("hf_overrides", "json", "model.hf_overrides", "a mapping; functions are refused"),
    works("enforce_eager", "switch", "executor.enforce_eager"),
    refused(
        "max_seq_len_to_capture",
        "int",
        "graphs are captured by number of requests, for every length: executor.cuda_graphs of executor gpu",
        8192,
    ),
    planned("disable_custom_all_reduce", "switch", "there is only torch.distributed's all-reduce so far", True, False),
    refused("tokenizer_pool_size", "int", _TOKENIZER_POOL, 0),
    refused("tokenizer_pool_type", "str", _TOKENIZER_POOL, "ray"),
    refused("tokenizer_pool_extra_config", "json", _TOKENIZER_POOL),
    planned("limit_mm_per_prompt", "json", _VISION),
    planned("mm_processor_kwargs", "json", _VISION),
    planned("disable_mm_preprocessor_cache", "switch", _VISION, False),
)

_ADAPTERS = (
    planned("enable_lora", "switch", _LORA, False),
    planned("enable_lora_bias", "switch", _LORA, False),
    planned("max_loras", "int", _LORA, 1),
    planned("max_lora_rank", "int", _LORA, 16),
    planned("lora_extra_vocab_size", "int", _LORA, 256),
    planned("lora_dtype", "str", _LORA, "auto"),
    planned("long_lora_scaling_factors", "str", _LORA),
    planned("max_cpu_loras", "int", _LORA),
    planned("fully_sharded_loras", "switch", _LORA, False),
    refused("enable_prompt_adapter", "switch", _PROMPT_ADAPTER, False),
    refused("max_prompt_adapters", "int", _PROMPT_ADAPTER, 1),
    refused("max_prompt_adapter_token", "int", _PROMPT_ADAPTER, 0),
    works("device", "str", "device", "a device type that torch and an executor know"),
    refused("num_scheduler_steps", "int", _MULTI_STEP, 1),
    refused("multi_step_stream_outputs", "switch", _MULTI_STEP, True),
    refused("scheduler_delay_factor", "float", "a delay before prompts is a scheduler's policy: write a plugin", 0),
    works("enable_chunked_prefill", "on/off", "scheduler.enable_chunked_prefill", "as a flag it takes no value"),
)

_SPECULATION = (
    works(
        "speculative_model",
        "str",
        f"{_ONE_DRAFTER}.name",
        f"the name of a draft worker; {_DRAFT_MODEL}",
        values={"[ngram]": "ngram"},
    ),
    works("speculative_model_quantization", "str", f"{_ONE_DRAFTER}.quantization", "an option of `draft_model`"),
    works("num_speculative_tokens", "int", f"{_ONE_DRAFTER}.num_tokens"),
    refused("speculative_disable_mqa_scorer", "switch", "drafts are always verified in one pass", False),
    refused("speculative_draft_tensor_parallel_size", "int", "draft models run on one rank, whatever the target's", 1),
    refused("speculative_max_model_len", "int", "a draft model drafts as far as its own positions and the target's go"),
    works(
        "speculative_disable_by_batch_size",
        "int",
        "speculative.disable_by_batch_size",
        "counts the requests of a step; by default drafting turns itself down where it does not pay",
    ),
    works("ngram_prompt_lookup_max", "int", f"{_ONE_DRAFTER}.max_match", "an option of the n-gram drafter"),
    works("ngram_prompt_lookup_min", "int", f"{_ONE_DRAFTER}.min_match", "an option of the n-gram drafter"),
    works(
        "spec_decoding_acceptance_method",
        "str",
        "speculative.acceptance.name",
        "any installed acceptance rule",
        values={"rejection_sampler": "rejection", "typical_acceptance_sampler": "typical"},
    ),
    works(
        "typical_acceptance_sampler_posterior_threshold",
        "float",
        "speculative.acceptance.epsilon",
        "an option of the rule `typical`",
    ),
    works(
        "typical_acceptance_sampler_posterior_alpha",
        "float",
        "speculative.acceptance.delta",
        "an option of the rule `typical`",
    ),
    works(
        "disable_logprobs_during_spec_decoding",
        "on/off",
        "speculative.disable_logprobs",
        "requests that ask for them all the same are refused, not answered without",
    ),
)

_NO_SUCH_HEADS = "no draft worker reads such heads; `dovetail plugins list` has those that there are"

_SPECULATIVE_PARTS: Mapping[str, ForeignName] = {
    part.name: part
    for part in (
        works(
            "method",
            "str",
            f"{_ONE_DRAFTER}.name",
            values={"eagle3": "eagle", "[ngram]": "ngram"},
            refuses=dict.fromkeys(
                ("mlp_speculator", "mtp", "deepseek_mtp", "ernie_mtp", "qwen3_next_mtp"), _NO_SUCH_HEADS
            ),
        ),
        works(
            "model",
            "str",
            f"{_ONE_DRAFTER}.path",
            refuses=dict.fromkeys(
                ("ngram", "[ngram]"), "n-grams are looked up without a model: give method='ngram' alone"
            ),
        ),
        works("num_speculative_tokens", "int", f"{_ONE_DRAFTER}.num_tokens"),
        works("prompt_lookup_max", "int", f"{_ONE_DRAFTER}.max_match"),
        works("prompt_lookup_min", "int", f"{_ONE_DRAFTER}.min_match"),
        works("quantization", "str", f"{_ONE_DRAFTER}.quantization"),
        works("revision", "str", f"{_ONE_DRAFTER}.revision"),
        works("disable_by_batch_size", "int", "speculative.disable_by_batch_size"),
        works("disable_logprobs", "switch", "speculative.disable_logprobs"),
        works(
            "acceptance_method",
            "str",
            "speculative.acceptance.name",
            values={"rejection_sampler": "rejection", "typical_acceptance_sampler": "typical"},
        ),
        works("posterior_threshold", "float", "speculative.acceptance.epsilon"),
        works("posterior_alpha", "float", "speculative.acceptance.delta"),
        works("suffix_decoding_max_spec_factor", "float", f"{_ONE_DRAFTER}.max_spec_factor"),
        works("suffix_decoding_min_token_prob", "float", f"{_ONE_DRAFTER}.min_token_prob"),
        refused("draft_tensor_parallel_size", "int", "draft models run on one rank, whatever the target's", 1),
        refused("max_model_len", "int", "a draft model drafts as far as its own positions and the target's go"),
        refused("disable_mqa_scorer", "switch", "drafts are always verified in one pass", False),
        refused("disable_padded_drafter_batch", "switch", "no batch is padded", True, False),
        refused("code_revision", "str", "no code of a model repository is ever run"),
        refused("enforce_eager", "switch", "executor.enforce_eager holds for target and drafter", False),
        refused(
            "speculative_token_tree", "str", "a drafter's own options give its tree (medusa: tree, eagle: top_k, depth)"
        ),
    )
}
"""Keys of `speculative_config`."""

_REST = (
    refused(
        "model_loader_extra_config",
        "json",
        "a weight format's options are written next to its name in model.weight_format",
    ),
    planned("ignore_patterns", "str", "only the files that a weight format needs are fetched"),
    works(
        "preemption_mode",
        "str",
        "scheduler.preemption_mode",
        "an option of the bundled schedulers",
        refuses={"swap": "requests are swapped wherever cache.swap_gib gives memory; set that, and leave this out"},
    ),
    refused("qlora_adapter_name_or_path", "str", "vLLM itself has dropped it; merge the adapter into the weights"),
    refused("show_hidden_metrics_for_version", "str", "no metric is hidden"),
    refused(
        "otlp_traces_endpoint",
        "str",
        "sinks are listed together, each with its options: write telemetry: [{name: otlp, endpoint: URL, protocol: "
        "grpc}], or http/protobuf, which is the default",
    ),
    refused(
        "collect_detailed_traces",
        "str",
        "each trace of the sink `otlp` has the phases queue, prefill and decode; workers report no spans of their own",
    ),
    refused("disable_async_output_proc", "switch", "overlap is the engine's business, not a setting", False),
    works("scheduling_policy", "str", "scheduler.name", "any installed scheduler"),
    refused(
        "scheduler_cls",
        "str",
        "vLLM's scheduler classes do not speak this contract; derive from dovetail.contracts.scheduler.Scheduler and "
        "write scheduler.name: pkg.mod:Class",
    ),
    refused("override_neuron_config", "json", "there is no Neuron backend"),
    planned("override_pooler_config", "json", "only text generation is served so far"),
    refused(
        "compilation_config",
        "json",
        "write executor: {name: gpu, cuda_graphs: [1, 8, 64], compile: default} or the like",
    ),
    planned("kv_transfer_config", "json", "KV blocks are not sent between engines yet"),
    refused(
        "worker_cls", "str", "workers are built from the chosen plugins; write the plugin that should differ", "auto"
    ),
    planned(
        "generation_config",
        "str",
        "the checkpoint's own is read: end-of-sequence ids, and sampling defaults for requests without SamplingParams; "
        "another one, or none, cannot be named",
        "auto",
    ),
    planned("override_generation_config", "json", "give sampling defaults as SamplingParams"),
    refused("enable_sleep_mode", "switch", "every engine can: call sleep and wake_up of LLMEngine", True, False),
    planned("calculate_kv_scales", "switch", "comes with 8-bit KV caches", False),
    refused("additional_config", "json", "a plugin's options are written next to its name"),
    ForeignName(
        "speculative_config",
        "json",
        "works",
        note="sets one drafter of the section `speculative`, which can hold several; its keys are those of the flags "
        "about speculation, and `method`",
        parts=_SPECULATIVE_PARTS,
        implied={
            "model": ("method", "draft_model"),
            "prompt_lookup_max": ("method", "ngram"),
            "prompt_lookup_min": ("method", "ngram"),
        },
    ),
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
        _SPECULATION,
        _REST,
        LATER_NAMES,
        SERVER_NAMES,
    )
    for name in group
}
"""By keyword, in vLLM's order of flags, later ones at the end."""
