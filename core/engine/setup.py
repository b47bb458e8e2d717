"""Builds what an engine is made of, in order: plugins, tokenizer, workers with their weights, KV memory, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dovetail.activity import activity
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import CapacityError, PluginError
from dovetail.contracts.executor import Executor, ExecutorNeed, WorkerReport
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.scheduler import Scheduler
from dovetail.contracts.speculation import AcceptanceRule
from dovetail.contracts.telemetry import TelemetrySink
from dovetail.engine.logits_setup import logits_setup
from dovetail.kv.layout import build_layout, check_capacity
from dovetail.kv.manager import KVCacheManager
from dovetail.registry.bootstrap import LoadedPlugins, bootstrap
from dovetail.registry.hooks import HookCaller, create_hook_caller
from dovetail.registry.registry import Registry
from dovetail.runner.spec import ModelWorkerSpec
from dovetail.tokenization import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class EngineParts:
    """The components of one engine."""

    tokenizer: Tokenizer | None
    executor: Executor
    kv: KVCacheManager
    scheduler: Scheduler
    processors: Mapping[str, LogitsProcessor]
    """Instances that validate requests; those that change logits live in the workers."""
    acceptance: type[AcceptanceRule] | None
    sinks: list[TelemetrySink]
    hooks: HookCaller


def create_parts(config: ResolvedConfig) -> EngineParts:
    """Raises `ConfigError`, `PluginError`, `ModelError`, `CapacityError`; nothing is left running then."""
    plugins = bootstrap(config.components(), config.plugin_hash)
    need = ExecutorNeed(
        config.device_type,
        config.tensor_parallel,
        enforce_eager=config.enforce_eager,
        max_num_seqs=config.limits.max_num_seqs,
    )
    executor: Executor = plugins.create(config.executor, ModelWorkerSpec(config), need)
    try:
        tokenizer = _start(config, plugins, executor)
        _compare_plugin_sets(config, executor)
        setup = logits_setup(config, tokenizer)
        return EngineParts(
            tokenizer=tokenizer,
            executor=executor,
            kv=create_kv(config, executor),
            scheduler=plugins.create(config.scheduler, config.limits),
            processors={name: plugins.create(c, setup) for name, c in config.logits_processors.items()},
            acceptance=_acceptance(config, plugins),
            sinks=[plugins.create(component) for component in config.telemetry],
            hooks=create_hook_caller(Registry.scan()),
        )
    except BaseException:
        executor.shutdown()
        raise


def _start(config: ResolvedConfig, plugins: LoadedPlugins, executor: Executor) -> Tokenizer | None:
    """Starts the workers, and meanwhile reads the tokenizer, which leaves this interpreter's lock to others for most of
    its time."""
    files = config.model.files
    with ThreadPoolExecutor(1, "dovetail-tokenizer") as pool:
        tokenizer = pool.submit(_load_tokenizer, config, plugins)
        with activity(f"loading weights of {_size_of(files.path) / 2**30:.2f} GiB from {files.path}"):
            executor.start()
        with activity("reading the tokenizer"):
            return tokenizer.result()


def _size_of(path: Path) -> int:
    """Bytes of a model's files, or of what lies beside them."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _acceptance(config: ResolvedConfig, plugins: LoadedPlugins) -> type[AcceptanceRule] | None:
    if config.speculation is None:
        return None
    rule, _ = plugins.get(config.speculation.acceptance)
    assert issubclass(rule, AcceptanceRule)
    return rule


def _load_tokenizer(config: ResolvedConfig, plugins: LoadedPlugins) -> Tokenizer | None:
    files = plugins.create(config.weight_format).tokenizer(config.model.files)
    return load_tokenizer(files, config.model.tokenizer_mode, config.model.tokenizer)


def _compare_plugin_sets(config: ResolvedConfig, executor: Executor) -> None:
    for rank, found in enumerate(executor.call("plugin_hash")):
        if found != config.plugin_hash:
            raise PluginError(
                f"rank {rank} runs other plugins than this process (plugin set {found[:12]}, here"
                f" {config.plugin_hash[:12]}): install the same distributions on every node"
            )


def create_kv(config: ResolvedConfig, executor: Executor) -> KVCacheManager:
    """The KV memory that the config asks for, or that the device holds."""
    reports: list[WorkerReport] = executor.call("describe")
    layout = build_layout(reports[0].caches, config.cache.block_size, reports[0].draft_caches)
    num_blocks = config.cache.num_blocks
    if num_blocks is None:
        num_blocks = min(report.available_bytes for report in reports) // layout.block_bytes
    num_host_blocks = config.cache.swap_bytes // layout.block_bytes
    _check_host_blocks(config, layout, num_host_blocks)
    return allocate_kv(config, executor, layout, num_blocks, num_host_blocks)


def allocate_kv(
    config: ResolvedConfig, executor: Executor, layout: KVLayout, num_blocks: int, num_host_blocks: int
) -> KVCacheManager:
    """KV memory of so many blocks, in place of what the workers have. Raises `CapacityError` before anything is done
    for fewer blocks than a sequence of full length takes."""
    drafters = config.speculation.drafters.values() if config.speculation is not None else ()
    lookahead = max((drafter.num_tokens for drafter in drafters if drafter.kv_cache), default=0)
    num_tokens = config.limits.max_num_batched_tokens + lookahead
    check_capacity(layout, num_blocks, config.model.max_model_len, num_tokens)
    with activity(f"setting up {num_blocks * layout.block_bytes / 2**30:.2f} GiB of KV cache"):
        executor.call("initialize_cache", layout, num_blocks, num_host_blocks)
    return KVCacheManager(
        layout,
        num_blocks,
        num_host_blocks=num_host_blocks,
        prefix_caching=config.cache.prefix_caching,
    )


def _check_host_blocks(config: ResolvedConfig, layout: KVLayout, num_host_blocks: int) -> None:
    if config.cache.swap_bytes and not num_host_blocks:
        raise CapacityError(
            f"cache.swap_gib gives {config.cache.swap_bytes} bytes, less than one KV block"
            f" ({layout.block_bytes} bytes): raise it, or set it to 0"
        )
