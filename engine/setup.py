"""Builds what an engine is made of, in order: plugins, tokenizer, workers with their weights, KV memory, scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path

from dovetail.config.resolved import ResolvedConfig, ResolvedDrafter
from dovetail.contracts.errors import CapacityError, ConfigError, DovetailError, ModelError, PluginError
from dovetail.contracts.executor import Executor
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.kv_connector import ConnectorSetup, KVConnector
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.scheduler import Scheduler
from dovetail.contracts.speculation import AcceptanceRule
from dovetail.contracts.telemetry import TelemetrySink
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.grammar_host import GrammarHost, create_grammar_host
from dovetail.engine.hooks import HookCaller, create_hook_caller
from dovetail.engine.kv.hashing import PagesIdentity
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.logits_setup import logits_setup
from dovetail.engine.resolving.cache import more_than_host
from dovetail.engine.tokenization.load import load_tokenizer_of
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.engine.workers import WorkerReports, Workers
from dovetail.registry.bootstrap import LoadedPlugins, bootstrap, plugin_hash
from dovetail.registry.registry import Registry
from dovetail.worker.activity import activity
from dovetail.worker.draft_tokenizers import DraftTokenizers
from dovetail.worker.kv_layout import build_layout, check_capacity, cut_layout, stage_block_bytes
from dovetail.worker.spec import ModelWorkerSpec


@dataclass(frozen=True)
class EngineParts:
    """The components of one engine."""

    tokenizer: Tokenizer | None
    executor: Executor
    workers: Workers
    """Those of the executor; calls go through it."""
    devices: tuple[str, ...]
    """Of the workers, in rank order, as torch names them."""
    kv: KVCacheManager
    scheduler: Scheduler
    processors: Mapping[str, LogitsProcessor]
    """Instances that validate requests; those that change logits live in the workers."""
    acceptance: type[AcceptanceRule] | None
    grammars: GrammarHost
    sinks: list[TelemetrySink]
    hooks: HookCaller
    create_connector: Callable[[bytes], KVConnector] | None
    """Creates the KV connector of a namespace; None where the config names none."""


_NO_BLOCKS = 2
"""Of a pool that nobody takes from: the fewest, the null block among them."""


def create_parts(config: ResolvedConfig) -> EngineParts:
    """Raises `ConfigError`, `PluginError`, `ModelError`, `CapacityError`; nothing is left running then."""
    plugins = bootstrap(config.components(), config.plugin_hash)
    # The tokenizer leaves this interpreter's lock to others for most of its time.
    with ThreadPoolExecutor(1, "dovetail-tokenizer") as pool:
        tokenizer = pool.submit(_load_tokenizer, config, plugins)
        # Which reads the vocabulary ahead, if it is to: while weights are loaded that costs least.
        grammars = pool.submit(lambda: create_grammar_host(config, plugins, tokenizer.result()))
        executor = _create_executor(config, plugins, tokenizer)
        try:
            with activity(
                f"loading weights of {_size_of(config.model.files.path) / 2**30:.2f} GiB from {config.model.files.path}"
            ):
                executor.start()
            with activity("reading the tokenizer"):
                tokenizer.result()
            workers = Workers(executor, config)
            _compare_plugin_sets(config, workers)
            return _parts(config, plugins, executor, workers, tokenizer.result(), grammars.result())
        except BaseException:
            executor.shutdown()
            if grammars.exception() is None:
                grammars.result().close()
            raise


def _create_executor(config: ResolvedConfig, plugins: LoadedPlugins, tokenizer: Future[Tokenizer | None]) -> Executor:
    # Only logits processors, and drafters that read text, have the workers wait for the tokenizer.
    logits = logits_setup(config, tokenizer.result()) if config.logits_processors else None
    spec = ModelWorkerSpec(config, logits, _draft_tokenizers(config, plugins, tokenizer))
    executor: Executor = plugins.create(config.executor, spec, config.executor_need())
    return executor


def _draft_tokenizers(
    config: ResolvedConfig, plugins: LoadedPlugins, target: Future[Tokenizer | None]
) -> DraftTokenizers:
    """What drafters that read text are handed."""
    reading = {name: one for name, one in _drafters_of(config).items() if one.reads_tokenizer}
    if not reading:
        return DraftTokenizers()
    own: dict[str, str | None] = {}
    for name, one in reading.items():
        if one.model is None:
            continue
        opener = plugins.create(one.model.weight_format)
        try:
            own[name] = _json_of(load_tokenizer_of(opener, one.model.files, config.model.tokenizer_mode))
        except DovetailError as error:
            raise type(error)(f"speculative.drafters.{name}, its own model: {error}") from error
    return DraftTokenizers(_json_of(target.result()), own)


def _json_of(tokenizer: Tokenizer | None) -> str | None:
    return tokenizer.tokenizer_json if tokenizer is not None else None


def _parts(
    config: ResolvedConfig,
    plugins: LoadedPlugins,
    executor: Executor,
    workers: Workers,
    tokenizer: Tokenizer | None,
    grammars: GrammarHost,
) -> EngineParts:
    setup = logits_setup(config, tokenizer)
    if grammars.compiler is not None:
        workers.call("use_grammars", grammars.compiler)
    reports = workers.describe()
    return EngineParts(
        tokenizer=tokenizer,
        executor=executor,
        workers=workers,
        devices=tuple(report.placement.device for report in reports.by_rank),
        kv=create_kv(config, workers, reports),
        scheduler=plugins.create(config.scheduler, config.limits),
        processors={name: plugins.create(c, setup) for name, c in config.logits_processors.items()},
        acceptance=_acceptance(config, plugins),
        grammars=grammars,
        sinks=[plugins.create(component) for component in config.telemetry],
        hooks=create_hook_caller(Registry.scan()),
        create_connector=None if config.kv_connector is None else partial(_create_connector, config, plugins),
    )


def _create_connector(config: ResolvedConfig, plugins: LoadedPlugins, namespace: bytes) -> KVConnector:
    assert config.kv_connector is not None
    setup = ConnectorSetup(namespace=namespace, num_ranks=config.num_ranks, block_size=config.cache.block_size)
    connector: KVConnector = plugins.create(config.kv_connector.component, setup)
    return connector


def pages_identity(config: ResolvedConfig, layout: KVLayout, weights: WeightsReport) -> PagesIdentity:
    """What the KV pages of an engine with these weights follow from."""
    used = (config.model_family, config.weight_format, config.quantization, config.attention, config.operators)
    status = [(file.name, file.stat()) for file in _files_of(config.model.files.path)]
    return PagesIdentity(
        weights=tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in status),
        weight_version=weights.version,
        weight_checksum=weights.checksum,
        plugins=plugin_hash([component for component in used if component is not None]),
        dtype=config.model.dtype,
        adapter_dtype=config.lora.dtype if config.lora is not None and config.lora.dtype != config.model.dtype else "",
        kv_dtype=config.cache.dtype,
        layout=layout,
        tensor_parallel=config.tensor_parallel,
        stage_layers=config.stage_layers,
    )


def _files_of(path: Path) -> list[Path]:
    """A model's file, or those of its directory."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def _size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in _files_of(path))


def _drafters_of(config: ResolvedConfig) -> Mapping[str, ResolvedDrafter]:
    return config.speculation.drafters if config.speculation is not None else {}


def _acceptance(config: ResolvedConfig, plugins: LoadedPlugins) -> type[AcceptanceRule] | None:
    if config.speculation is None:
        return None
    rule, _ = plugins.get(config.speculation.acceptance)
    assert issubclass(rule, AcceptanceRule)
    return rule


def _load_tokenizer(config: ResolvedConfig, plugins: LoadedPlugins) -> Tokenizer | None:
    model = config.model
    weight_format = plugins.create(config.weight_format)
    return load_tokenizer_of(weight_format, model.files, model.tokenizer_mode, model.tokenizer, model.chat_template)


def _compare_plugin_sets(config: ResolvedConfig, workers: Workers) -> None:
    for rank, found in enumerate(workers.call("plugin_hash")):
        if found != config.plugin_hash:
            raise PluginError(
                f"rank {rank} runs other plugins than this process (plugin set {found[:12]}, here"
                f" {config.plugin_hash[:12]}): install the same distributions on every node"
            )


def create_kv(config: ResolvedConfig, workers: Workers, reports: WorkerReports) -> KVCacheManager:
    """The KV memory that the config asks for, or that the device holds."""
    layout = _layout(config, reports)
    if not layout.groups:
        return allocate_kv(config, workers, layout, _NO_BLOCKS, 0)
    num_blocks = config.cache.num_blocks
    if num_blocks is None:
        num_blocks = min(
            report.available_bytes // max(1, stage_block_bytes(layout)[report.placement.stage])
            for report in reports.by_rank
        )
    num_host_blocks = config.cache.swap_bytes // max(stage_block_bytes(layout))
    _check_host_blocks(config, layout, num_host_blocks)
    return allocate_kv(config, workers, layout, num_blocks, num_host_blocks)


def _layout(config: ResolvedConfig, reports: WorkerReports) -> KVLayout:
    """Of the whole model, and of each pipeline stage where there are several."""
    caches = [report.caches for report in reports.of_stages]
    num_layers = sum(map(len, caches))
    if config.stage_layers and num_layers != config.model.size.num_layers:
        raise ModelError(
            f"the stages have {num_layers} attention layers, and the model family {config.model_family.name} says"
            f" {config.model.size.num_layers}: its layers cannot be divided so; set executor.pipeline_parallel to 1"
        )
    layout = build_layout(sum(caches, ()), config.cache.block_size, reports.answering.extra_caches)
    return layout if len(caches) == 1 else cut_layout(layout, caches)


def allocate_kv(
    config: ResolvedConfig, workers: Workers, layout: KVLayout, num_blocks: int, num_host_blocks: int
) -> KVCacheManager:
    """KV memory of so many blocks, in place of what the workers have. Raises `CapacityError` before anything is done
    for fewer blocks than a sequence of full length takes, and for more than host memory holds."""
    drafters = _drafters_of(config).values()
    lookahead = max((drafter.num_tokens for drafter in drafters if drafter.looks_ahead), default=0)
    num_tokens = config.limits.max_num_batched_tokens + lookahead
    check_capacity(layout, num_blocks, config.model.max_model_len, num_tokens)
    in_host = num_host_blocks + (num_blocks if config.device_type == "cpu" else 0)
    num_bytes, host_bytes = (
        in_host * sum(stage_block_bytes(layout)) * config.tensor_parallel,
        config.worker_memory_bytes,
    )
    if num_bytes > host_bytes:
        what = f"{num_blocks} KV blocks and {num_host_blocks} on the host"
        raise CapacityError(more_than_host(what, num_bytes, config.num_ranks, host_bytes))
    with activity(f"setting up {num_blocks * sum(stage_block_bytes(layout)) / 2**30:.2f} GiB of KV cache"):
        workers.call("initialize_cache", layout, num_blocks, num_host_blocks)
    return KVCacheManager(
        layout,
        num_blocks,
        num_host_blocks=num_host_blocks,
        prefix_caching=config.cache.prefix_caching,
    )


def check_block_counts(**counts: object) -> None:
    """Raises `ConfigError` for what is no number of blocks, by the argument's name."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
            raise ConfigError(f"{name} must be an integer of 0 or more, got {count!r}")


def _check_host_blocks(config: ResolvedConfig, layout: KVLayout, num_host_blocks: int) -> None:
    if config.cache.swap_bytes and not num_host_blocks:
        raise CapacityError(
            f"cache.swap_gib gives {config.cache.swap_bytes} bytes, less than one KV block"
            f" ({max(stage_block_bytes(layout))} bytes): raise it, or set it to 0"
        )
