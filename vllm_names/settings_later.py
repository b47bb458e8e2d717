"""vLLM's names that `vllm serve` 0.8 lacks: the fields of `EngineArgs` 0.11 that came later, in its order, and a few
that had gone before 0.8. As `dovetail.vllm.settings`, this is data about another project's vocabulary."""

from __future__ import annotations

from dovetail.config.foreign_names import ForeignName, planned, refused, works

_POOLERS = (
    "a model generates and is pooled as its checkpoint is made, with the poolers of the section `pooling`",
    "leave it out, and name poolers in that section",
)
_MEDIA = ("models take text only so far", "describe images in the prompt, and leave it out")
_REPLICAS = (
    "the replicas of a server run on its machine, and a router in the server shares requests out",
    "give data_parallel_size alone; on several machines start one server each, behind a proxy",
)
_EXPERTS = ("experts are split over ranks as every layer is", "use tensor_parallel_size")
_MICRO_BATCHES = ("steps are not cut into overlapping micro-batches yet", "leave it out")
_RECURRENT = ("models with a recurrent state are not served yet", "take a model that has attention alone")
_LEAVE_OUT = "leave it out"
_BUCKETS = ("the trainer says how large buckets are", "give bucket_bytes to the sender's `send` (docs/rl.md)")
_WEIGHT_TRANSFER = (
    works(
        "backend",
        "str",
        "weight_transport.name",
        "any installed transport",
        values={"nccl": "collective"},
        refuses={
            "sparse_nccl": "updates bring whole tensors; use nccl, with partial=True for some of them",
            "sharded_rdt": "each worker gets whole tensors; use nccl",
        },
    ),
    refused("packed", "switch", "tensors always travel in buckets", _LEAVE_OUT, True, False),
    refused("packed_buffer_size_bytes", "int", *_BUCKETS),
    refused("packed_num_buffers", "int", *_BUCKETS),
    refused("reload_mode", "str", "updates are whole or leave the old weights", _LEAVE_OUT, "layerwise"),
)

LATER_NAMES: tuple[ForeignName, ...] = (
    refused("runner", "str", *_POOLERS, "auto", "generate", "pooling"),
    refused("convert", "str", *_POOLERS, "auto", "none", "embed"),
    planned(
        "enable_prompt_embeds", "switch", "embeddings are not taken as prompts yet", "send text or token ids", False
    ),
    planned("allowed_media_domains", "json", *_MEDIA),
    refused("safetensors_load_strategy", "str", "safetensors files are mapped into memory", _LEAVE_OUT, "lazy"),
    works("cuda_graph_sizes", "json", "executor.cuda_graphs", "an option of executor `gpu`", no_effect=([],)),
    planned("decode_context_parallel_size", "int", "KV caches are split by heads alone", "use tensor_parallel_size", 1),
    works("data_parallel_size", "int", "server.data_parallel_size", "`dovetail serve` alone runs several replicas"),
    planned("data_parallel_rank", "int", *_REPLICAS),
    planned("data_parallel_start_rank", "int", *_REPLICAS),
    planned("data_parallel_size_local", "int", *_REPLICAS),
    planned("data_parallel_address", "str", *_REPLICAS),
    planned("data_parallel_rpc_port", "int", *_REPLICAS),
    planned("data_parallel_hybrid_lb", "switch", *_REPLICAS, False),
    planned("data_parallel_backend", "str", *_REPLICAS, "mp"),
    planned("enable_expert_parallel", "switch", *_EXPERTS, False),
    planned("enable_dbo", "switch", *_MICRO_BATCHES, False),
    planned("dbo_decode_token_threshold", "int", *_MICRO_BATCHES, 32),
    planned("dbo_prefill_token_threshold", "int", *_MICRO_BATCHES, 512),
    planned("eplb_config", "json", *_EXPERTS, {}),
    planned("enable_eplb", "switch", *_EXPERTS, False),
    planned("expert_placement_strategy", "str", *_EXPERTS, "linear"),
    planned("num_redundant_experts", "int", *_EXPERTS, 0),
    planned("eplb_window_size", "int", *_EXPERTS, 1000),
    planned("eplb_step_interval", "int", *_EXPERTS, 3000),
    planned("eplb_log_balancedness", "switch", *_EXPERTS, False),
    refused("prefix_caching_hash_algo", "str", "blocks are always found by BLAKE2b hashes", _LEAVE_OUT, "sha256"),
    refused(
        "disable_cascade_attn",
        "switch",
        "whether a common prefix is read once is the attention backend's business",
        _LEAVE_OUT,
        False,
    ),
    works("kv_cache_memory_bytes", "int", "cache.memory_gib", "bytes; the key counts GiB", factor=2.0**-30),
    refused(
        "hf_token", "str", "the hub's own client keeps it", "run `hf auth login`, or set the variable HF_TOKEN", False
    ),
    planned("interleave_mm_strings", "switch", *_MEDIA, False),
    planned("media_io_kwargs", "json", *_MEDIA, {}),
    planned("mm_processor_cache_gb", "float", *_MEDIA, 4, 0),
    planned("mm_processor_cache_type", "str", *_MEDIA, "lru"),
    planned("mm_shm_cache_max_object_size_mb", "int", *_MEDIA, 128),
    planned("mm_encoder_tp_mode", "str", *_MEDIA, "weights"),
    refused(
        "io_processor_plugin",
        "str",
        "what turns data into prompts and outputs into data goes around the engine",
        "write a route plugin",
    ),
    planned("skip_mm_profiling", "switch", *_MEDIA, False),
    planned("video_pruning_rate", "float", *_MEDIA, 0),
    planned("default_mm_loras", "json", *_MEDIA),
    planned("disable_chunked_mm_input", "switch", *_MEDIA, False),
    planned("enable_multimodal_encoder_data_parallel", "switch", *_MEDIA, False),
    refused(
        "disable_hybrid_kv_cache_manager",
        "switch",
        "groups of layers always have KV blocks with lifetimes of their own",
        _LEAVE_OUT,
        False,
    ),
    refused(
        "structured_outputs_config",
        "json",
        "it is a section of the config here",
        "write grammar: {name: xgrammar} or the like",
        {},
    ),
    works(
        "reasoning_parser",
        "str",
        "dialect.name",
        "the dialect reads reasoning and calls alike: with another tool_call_parser give that one alone",
        values={"qwen3": "hermes"},
        no_effect=("",),
    ),
    refused("guided_decoding_disable_fallback", "switch", "grammar plugins never fall back", _LEAVE_OUT, True, False),
    refused(
        "guided_decoding_disable_any_whitespace",
        "switch",
        "requests bound whitespace themselves",
        "give structured_outputs max_whitespace=0",
        False,
    ),
    refused(
        "guided_decoding_disable_additional_properties",
        "switch",
        "schemas say so themselves",
        "give them additionalProperties: false",
        False,
    ),
    refused("pooler_config", "json", *_POOLERS),
    refused(
        "worker_extension_cls",
        "str",
        "workers are built from the chosen plugins",
        "write the plugin that should differ",
        "",
    ),
    refused(
        "kv_events_config",
        "json",
        "a telemetry sink publishes KV events, in vLLM's format",
        "write telemetry: [{name: kv_events, endpoint: ...}], whose options have the names of vLLM's config",
    ),
    refused("override_attention_dtype", "str", "attention computes in the model's dtype", "set dtype"),
    planned("mamba_cache_dtype", "str", *_RECURRENT, "auto"),
    planned("mamba_ssm_cache_dtype", "str", *_RECURRENT, "auto"),
    refused("use_tqdm_on_load", "switch", "loading shows no bar", _LEAVE_OUT, True, False),
    refused("pt_load_map_location", "str", "weights are read straight to where they are used", _LEAVE_OUT, "cpu"),
    refused(
        "logits_processors",
        "json",
        "vLLM's processor classes do not speak this contract",
        "derive from dovetail.contracts.logits.LogitsProcessor and name the class in the section logits_processors, a "
        "mapping",
        [],
    ),
    refused(
        "async_scheduling",
        "switch",
        "overlapping steps is the engine's business, not a setting",
        _LEAVE_OUT,
        True,
        False,
    ),
    planned(
        "kv_sharing_fast_prefill",
        "switch",
        "layers that share another layer's KV cache are not served yet",
        _LEAVE_OUT,
        False,
    ),
    refused(
        "enable_log_requests",
        "switch",
        "a telemetry sink records requests",
        "write telemetry: [{name: jsonl, path: FILE}], which has a line for each request",
        False,
    ),
    refused("disable_log_requests", "switch", "no request is logged unless `telemetry` says so", _LEAVE_OUT, True),
    refused(
        "sliding_window",
        "int",
        "a model's window is always honoured as its config says",
        "where its architecture reads one, hf_overrides={'sliding_window': N} changes it",
    ),
    refused("max_paddings", "int", "no batch is padded, and vLLM has dropped it in 0.3", _LEAVE_OUT),
    refused(
        "use_beam_search",
        "switch",
        "beam search is a call of its own",
        "call LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
        False,
    ),
    ForeignName(
        "weight_transfer_config",
        "json",
        "works",
        note="sets `weight_transport`, where vLLM's `nccl` is `collective` over gloo; trainers send with the senders "
        "of `dovetail.rl`, not with vLLM's",
        parts={one.name: one for one in _WEIGHT_TRANSFER},
        implied={one.name: ("backend", "nccl") for one in _WEIGHT_TRANSFER[1:]},
    ),
)
