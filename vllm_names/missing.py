"""Names of vLLM that Dovetail does not have, each with the reason, so that a program ends with a clear message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from dovetail.contracts.errors import RequestError
from dovetail.vllm.settings import VLLM_NAMES

BEAM_SEARCH = VLLM_NAMES["use_beam_search"].refusal
PROCESSORS = (
    "functions do not travel to workers; write a logits processor plugin, name it in the section logits_processors and"
    " give its options as SamplingParams(processors={name: options})"
)
_SINKS = "measurements go to the sinks that `telemetry` names"
_TRACES = "a sink of the section `telemetry` sends traces, as in telemetry: [{name: otlp, endpoint: URL}]"
POOLING = (
    "the section `pooling` names a pooler for each task, as in LLM(pooling={'embed': 'mean'}), and"
    " `LLM.llm_engine.facts.pooling` lists the tasks that are served (docs/pooling.md)"
)
GRAMMARS = "the section grammar of the config chooses what compiles them, and sets its limits (docs/grammars.md)"
MEDIA = "models take text only so far: images, audio and video come with multimodal model families"
REMOTE_CODE = (
    "code that runs in workers is a plugin: a model family, a logits processor, a draft worker (docs/plugins.md)"
)
PROFILER = (
    "profilers attach from outside: executor cpu runs the model in this process, so torch.profiler.profile() around"
    " generate() sees every operator; for other executors give a profiler the worker's process id"
)
_REPLICAS = VLLM_NAMES["data_parallel_rank"].refusal

_CONFIG = (
    "there are no config objects: settings are keywords, a mapping or a file (docs/configuration.md), and"
    " `LLM.llm_engine.config` is what they came to"
)

_MODULES: Mapping[str, str] = {
    "assets": MEDIA,
    "attention": "attention backends are plugins here: derive from dovetail.contracts.attention.AttentionBackend",
    "benchmarks": "its data sets are not part of Dovetail; measure with `dovetail bench` and `dovetail ab`",
    "compilation": "what is captured and compiled is set with executor: {name: gpu, cuda_graphs: [...], compile: ...}",
    "config": _CONFIG,
    "distributed": "ranks speak through the executor and its workers; only cleanup_dist_env_and_memory is here",
    "entrypoints.openai": "the OpenAI-compatible server is not there yet: use LLM or AsyncLLM",
    "entrypoints.score_utils": POOLING,
    "envs": "there are no environment variables that change behaviour: settings are in the config"
    " (docs/configuration.md)",
    "executor": "executors are plugins here: derive from dovetail.contracts.executor.Executor (docs/executors.md)",
    "logits_process": "logits processors are plugins here: derive from dovetail.contracts.logits.LogitsProcessor",
    "lora": "adapters are named by LoRARequest, in dovetail.vllm.lora.request",
    "model_executor": "models are plugins here: derive from dovetail.contracts.model.ModelFamily and build from"
    " dovetail.nn; sharded and serialized states of vLLM's loaders are not read, save safetensors instead",
    "multimodal": MEDIA,
    "platforms": "devices are named as torch names them: LLM(device='cpu'), LLM(device='cuda')",
    "plugins": "plugins are found through entry points (docs/plugins.md)",
    "ray": "the Ray executor is not there yet: executor multiproc runs several ranks on one machine",
    "reasoning": "what a model thinks is not separated from its answer yet",
    "spec_decode": "draft workers are plugins here: derive from dovetail.contracts.speculation.DraftWorker",
    "transformers_utils": "tokenizers are `LLM.get_tokenizer()`; configs are `LLM.llm_engine.config.model.hf_config`",
    "v1.core": "schedulers are plugins here: derive from dovetail.contracts.scheduler.Scheduler",
    "v1.executor": "executors are plugins here: derive from dovetail.contracts.executor.Executor (docs/executors.md)",
    "v1.sample": "logits processors are plugins here: derive from dovetail.contracts.logits.LogitsProcessor and name"
    " the class in the section logits_processors",
    "v1.worker": REMOTE_CODE,
    "worker": REMOTE_CODE,
}
"""Reasons by module below `vllm`; deeper modules have the same reason."""

_NAMES: Mapping[str, str] = {
    "ModelRegistry": _MODULES["model_executor"],
    "initialize_ray_cluster": _MODULES["ray"],
    "__version__": "vLLM itself is not here: dovetail.__version__ is Dovetail's",
    "__version_tuple__": "vLLM itself is not here: dovetail.__version__ is Dovetail's",
}

MEMBERS: Mapping[str, str] = {
    "vllm_config": "there are no config objects: `config` of the engine is what the settings came to, such as"
    " config.model.hf_config",
    "model_config": "there are no config objects: see config.model of the engine",
    "get_vllm_config": "there are no config objects: see `config` of the engine",
    "get_model_config": "there are no config objects: see config.model of the engine",
    "input_processor": "prompts are processed by `process_input` of the engine",
    "processor": "prompts are processed by `process_input` of the engine",
    "engine_core": "the step loop is `core` of the engine",
    "model_executor": REMOTE_CODE,
    "do_log_stats": _SINKS,
    "do_log_stats_with_interval": _SINKS,
    "reset_mm_cache": MEDIA,
    "scale_elastic_ep": _REPLICAS,
    "is_tracing_enabled": _TRACES,
    "preprocess_chat": "LLM.render_chat gives the prompt of a conversation",
    "supported_tasks": POOLING,
    "get_supported_tasks": POOLING,
}
"""Reasons for vLLM's classes, by name."""


CONFIGS: Mapping[str, str] = {
    "KVTransferConfig": "KV blocks are not sent between engines yet, so prompts and answers are computed by one engine",
    "KVEventsConfig": VLLM_NAMES["kv_events_config"].refusal,
    "CompilationConfig": _MODULES["compilation"],
    "PoolerConfig": POOLING,
    "StructuredOutputsConfig": GRAMMARS,
    "VllmConfig": _CONFIG,
}
"""Reasons for vLLM's config classes, by name."""

_ARGUMENTS: Mapping[str, str] = {
    "prompt_adapter_request": "vLLM itself has dropped prompt adapters",
    "guided_options_request": "give SamplingParams(structured_outputs=...)",
    "mm_processor_kwargs": MEDIA,
    "tokenization_kwargs": "tokenize with get_tokenizer() and send prompt_token_ids",
    "concurrency_limit": "prompts are searched one after another; leave it out",
    "prompt_text": "give prompt={'prompt_token_ids': ids, 'prompt': text}",
    "inputs": "it is called prompt",
    "data_parallel_rank": _REPLICAS,
    "stat_loggers": _SINKS,
    "start_engine_loop": "it always starts",
}
"""Reasons for methods, by name."""


def answering(module: str) -> Callable[[str], NoReturn]:
    """Returns a module's `__getattr__`, which raises an ImportError with the reason: `from module import name` would
    drop the text of an AttributeError. Names that Python itself asks for raise AttributeError."""

    def answer(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        reason = CONFIGS.get(name) or _NAMES.get(name)
        said = f"vLLM's {name} is not in Dovetail"
        raise ImportError(f"{said}: {reason}" if reason else f"{said} (docs/from-vllm.md lists what is)", name=module)

    return answer


def missing_name(name: str) -> str:
    """Why `dovetail.vllm` has no such name."""
    reason = _NAMES.get(name) or _MODULES.get(name)
    if reason is None:
        return f"dovetail.vllm has no {name!r}: what it has of vLLM's names is in dovetail.vllm.__all__"
    return f"vLLM's {name} is not in Dovetail: {reason}"


def missing_member(owner: object, name: str) -> str:
    """Why one of the classes here has no such attribute."""
    kind = type(owner).__name__
    reason = MEMBERS.get(name)
    if reason is None:
        return f"{kind} has no attribute {name!r}, in Dovetail at least (docs/from-vllm.md lists what it has)"
    return f"{kind}.{name} is not in Dovetail: {reason}"


def refuse(what: str, reason: str) -> NoReturn:
    """Raises `RequestError`: `what` was asked for and cannot be served."""
    raise RequestError(f"{what} is not served: {reason}")


def refuse_given(call: str, given: Mapping[str, Any]) -> None:
    """Refuses arguments of vLLM's that are not served, unless they are None. Raises `RequestError` with the reason, and
    TypeError for a name that is no argument of vLLM's."""
    for name, value in given.items():
        if name not in _ARGUMENTS:
            raise TypeError(f"{call} has no argument {name!r}; known besides its own: {', '.join(sorted(_ARGUMENTS))}")
        if value is not None:
            refuse(f"{call}({name}=...)", _ARGUMENTS[name])


class MissingModules(MetaPathFinder):
    """Refuses the import of a module of vLLM that Dovetail does not have, with the reason."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for modules of others. Raises ImportError: a ModuleNotFoundError of this name would be swallowed by
        `from package import name`, and the reason with it."""
        package, _, module = fullname.partition(f"{self._package}.")
        if package or not module:
            return None
        if "." not in module and module not in _MODULES:
            raise ImportError(missing_name(module), name=fullname)
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            reason = _MODULES.get(".".join(parts[:length]))
            if reason is not None:
                raise ImportError(f"vLLM's module {module} is not in Dovetail: {reason}", name=fullname)
        raise ImportError(f"vLLM's module {module} is not in Dovetail (docs/from-vllm.md lists what is)", name=fullname)
