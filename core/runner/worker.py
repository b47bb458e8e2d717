"""One rank: plugins, weights, KV pages and the model runner, behind the `Worker` protocol."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.attention import AttentionBackend, AttentionNeed, AttentionSetup
from dovetail.contracts.device import Device
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.executor import PendingStep, Placement, WorkerReport
from dovetail.contracts.kv import KVLayout, KVSpec
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.model import CausalLM
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.engine.logits_setup import logits_setup
from dovetail.kv.layout import build_layout
from dovetail.nn.communicator import Communicator, SingleProcess, TorchDistributed
from dovetail.nn.context import ModelContext
from dovetail.nn.operators import torch_operators
from dovetail.registry.bootstrap import LoadedPlugins, bootstrap
from dovetail.registry.environment import detect_environment
from dovetail.runner.block_mover import BlockMover
from dovetail.runner.forward import EagerForward, ForwardPass, create_forward
from dovetail.runner.kv_storage import KVStorage
from dovetail.runner.memory import check_weights_fit, kv_bytes, largest_step, run_largest
from dovetail.runner.model_runner import ModelRunner
from dovetail.runner.plain_device import PlainDevice
from dovetail.runner.sleep import Sleeper
from dovetail.runner.speculation import create_speculation
from dovetail.tokenization import load_tokenizer


class ModelWorker:
    """Built by `ModelWorkerSpec.create`; see `dovetail.contracts.executor.Worker` for its life."""

    def __init__(self, config: ResolvedConfig, placement: Placement):
        self._config = config
        self._placement = placement
        self._plugins: LoadedPlugins = bootstrap(config.components(), config.plugin_hash)
        runtime = placement.runtime
        create_device = PlainDevice if runtime is None else runtime.create_device
        self._runtime_device: Device = create_device(placement.device)
        self._device = self._runtime_device.torch_device
        self._communicator = _connect(placement)
        self._model: CausalLM | None = None
        self._context: ModelContext | None = None
        self._runner: ModelRunner | None = None
        self._forward: ForwardPass | None = None
        self._storage: KVStorage | None = None
        self._sleeper: Sleeper | None = None

    def load(self) -> None:
        """Builds the model and reads its weights. Raises `ModelError`, and `CapacityError` for a device that cannot
        hold them."""
        config = self._config
        check_weights_fit(config, self._runtime_device)
        quantization = self._create_quantization()
        context = ModelContext(
            dtype=getattr(torch, config.model.dtype),
            device=self._device,
            max_model_len=config.model.max_model_len,
            kv_dtype=config.cache.dtype,
            communicator=self._communicator,
            quantization=quantization,
            operators=self._create_operators(),
        )
        with torch.inference_mode():
            model = self._plugins.create(config.model_family).create(config.model.hf_config, context)
            self._model, self._context = model, context
            self._read_weights()

    def _read_weights(self) -> None:
        assert self._model is not None
        assert self._context is not None
        quantization = self._context.quantization
        reader = self._plugins.create(self._config.weight_format).open(self._config.model.files)
        try:
            self._model.load_weights(reader.tensors(quantization.holds if quantization is not None else frozenset()))
        finally:
            reader.close()

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        assert self._runner is not None, "initialize_cache comes before execute"
        return self._runner.execute(plan)

    def submit(self, plan: StepPlan) -> PendingStep | StepResult:
        """Hands one step over."""
        assert self._runner is not None, "initialize_cache comes before submit"
        return self._runner.submit(plan)

    def call(self, method: str, *args: Any) -> Any:
        """The named operations of the contract."""
        operations: Mapping[str, Any] = {
            "describe": self._describe,
            "initialize_cache": self._initialize_cache,
            "plugin_hash": lambda: self._plugins.plugin_hash,
            "ping": lambda: self._placement.rank,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }
        if method not in operations:
            raise ConfigError(f"workers have no operation {method!r}; they have {', '.join(operations)}")
        return operations[method](*args)

    def close(self) -> None:
        """Frees weights and KV pages, and leaves the process group."""
        self._model = self._context = self._runner = self._forward = self._storage = self._sleeper = None
        if self._placement.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _create_quantization(self) -> QuantizationMethod | None:
        component = self._config.quantization
        return None if component is None else self._plugins.create(component, self._config.quantization_need())

    def _create_operators(self) -> Operators:
        component = self._config.operators
        return torch_operators() if component is None else self._plugins.create(component)

    def _describe(self) -> WorkerReport:
        assert self._context is not None
        return WorkerReport(
            caches=tuple(layer.cache for layer in self._context.attention_layers),
            available_bytes=self._available_bytes(),
        )

    def _available_bytes(self) -> int:
        memory = self._config.cache.memory_bytes
        if memory is not None:
            return memory
        if self._config.cache.num_blocks is not None:
            return 0  # the config counts blocks itself, and nobody asks
        return self._profiled_bytes()

    def _profiled_bytes(self) -> int:
        """What the largest step leaves of the device's memory: it is run once, over a cache of one page."""
        assert self._context is not None
        assert self._model is not None
        device, config = self._runtime_device, self._config
        layout = build_layout([layer.cache for layer in self._context.attention_layers], config.cache.block_size)
        storage = KVStorage(layout, 1, 0, self._device)
        backends = self._bind(layout, storage)
        step = largest_step(config.limits, config.model.max_model_len, layout)
        rows = min(config.limits.max_num_seqs, len(step.input_ids))
        forward = EagerForward(self._model.forward, backends)
        peak = device.measure(partial(run_largest, self._model, forward, step, rows, self._device))
        device.release_unused()
        return kv_bytes(device.memory(), config.cache.memory_fraction, peak)

    def _initialize_cache(self, layout: KVLayout, num_blocks: int, num_host_blocks: int) -> None:
        assert self._context is not None
        assert self._model is not None
        storage = KVStorage(layout, num_blocks, num_host_blocks, self._device)
        backends = self._bind(layout, storage)
        setup = logits_setup(self._config, self._load_tokenizer())
        processors: dict[str, LogitsProcessor] = {
            name: self._plugins.create(component, setup) for name, component in self._config.logits_processors.items()
        }
        speculation = create_speculation(self._config, self._plugins, self._model, self._context, layout)
        device = self._runtime_device
        query_lens = [1] if speculation is None else [1, 1 + speculation.max_drafts]
        runtime = self._placement.runtime
        forward = create_forward(device, runtime, self._model, backends, self._config.limits, query_lens)
        mover = BlockMover(device, storage)
        self._runner = ModelRunner(
            self._config, self._model, self._context, layout, mover, forward, device, processors, speculation
        )
        self._forward, self._storage = forward, storage

    def _sleep(self, level: int) -> int:
        assert self._model is not None
        assert self._storage is not None
        if self._sleeper is not None:
            raise ConfigError("the worker sleeps already: call wake_up first")
        self._runtime_device.synchronize()
        self._sleeper = Sleeper(self._model, self._storage.lanes, self._runtime_device, level)
        return self._sleeper.sleep()

    def _wake_up(self) -> None:
        if self._sleeper is None:
            raise ConfigError("the worker is awake")
        assert self._forward is not None
        if self._sleeper.wake_up():
            with torch.inference_mode():
                self._read_weights()
        self._sleeper = None
        self._forward.prepare()

    def _bind(self, layout: KVLayout, storage: KVStorage) -> list[AttentionBackend]:
        environment = detect_environment(self._config.device_type)
        return [self._bind_group(layout, group_id, storage, environment) for group_id in range(len(layout.groups))]

    def _bind_group(
        self, layout: KVLayout, group_id: int, storage: KVStorage, environment: Environment
    ) -> AttentionBackend:
        """Creates the backend of one KV group and hands each of its layers the backend and its pages."""
        assert self._context is not None
        config = self._config
        layers = [self._context.attention_layers[layer_id] for layer_id in layout.groups[group_id].layer_ids]
        spec = layers[0].cache
        assert isinstance(spec, KVSpec)
        setup = AttentionSetup(
            layers=tuple(layer.layer for layer in layers),
            spec=spec,
            block_size=layout.block_size,
            dtype=config.model.dtype,
            device=str(self._device),
            max_num_seqs=config.limits.max_num_seqs,
            max_num_batched_tokens=config.limits.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
        )
        self._check_attention(setup, environment)
        backend: AttentionBackend = self._plugins.create(config.attention, setup)
        for lane, layer in enumerate(layers):
            layer.bind(backend, storage.view(lane, spec, backend))
        return backend

    def _check_attention(self, setup: AttentionSetup, environment: Environment) -> None:
        """Asks the backend again, now that the layers themselves say what they need: a config could only be guessed
        from."""
        backend, options = self._plugins.get(self._config.attention)
        need = AttentionNeed(
            device_type=self._config.device_type,
            dtype=setup.dtype,
            block_size=setup.block_size,
            head_sizes=frozenset(layer.head_size for layer in setup.layers),
            sliding_window=any(layer.window is not None for layer in setup.layers),
            soft_cap=any(layer.soft_cap is not None for layer in setup.layers),
            alibi=any(layer.alibi_slopes is not None for layer in setup.layers),
            kv_dtype=setup.spec.dtype,
        )
        reasons = backend.check(need, options, environment)
        if reasons:
            name = self._config.attention.name
            raise ConfigError(f"attention {name!r} cannot serve this model's layers: {' '.join(reasons)}")

    def _load_tokenizer(self) -> Any:
        """Only logits processors ask for it, on the rank that samples."""
        if not self._config.logits_processors or self._placement.rank != 0:
            return None
        files = self._plugins.create(self._config.weight_format).tokenizer(self._config.model.files)
        return load_tokenizer(files, self._config.model.tokenizer_mode, self._config.model.tokenizer)


def _connect(placement: Placement) -> Communicator:
    if placement.world_size == 1:
        return SingleProcess()
    dist.init_process_group(
        "nccl" if placement.device.startswith("cuda") else "gloo",
        init_method=placement.init_method,
        rank=placement.rank,
        world_size=placement.world_size,
    )
    return TorchDistributed()
