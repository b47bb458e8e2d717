"""One rank: plugins, weights, KV pages and the model runner, behind the `Worker` protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.attention import AttentionBackend, AttentionNeed, AttentionSetup
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.executor import Placement, WorkerReport
from dovetail.contracts.kv import KVLayout, KVSpec
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.model import CausalLM
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.contracts.weights import WeightReader
from dovetail.engine.logits_setup import logits_setup
from dovetail.nn.communicator import Communicator, SingleProcess, TorchDistributed
from dovetail.nn.context import ModelContext
from dovetail.nn.kept_kernels import KernelKeeper
from dovetail.nn.operators import torch_operators
from dovetail.nn.packed_cache import PackedCache, default_directory
from dovetail.registry.bootstrap import LoadedPlugins, bootstrap
from dovetail.registry.environment import detect_environment
from dovetail.runner.kv_storage import KVStorage
from dovetail.runner.model_runner import ModelRunner
from dovetail.runner.speculation import create_speculation
from dovetail.tokenization import load_tokenizer


class ModelWorker:
    """Built by `ModelWorkerSpec.create`; see `dovetail.contracts.executor.Worker` for its life."""

    def __init__(self, config: ResolvedConfig, placement: Placement):
        self._config = config
        self._placement = placement
        self._plugins: LoadedPlugins = bootstrap(config.components(), config.plugin_hash)
        self._device = torch.device(placement.device)
        self._communicator = _connect(placement)
        self._model: CausalLM | None = None
        self._context: ModelContext | None = None
        self._runner: ModelRunner | None = None

    def load(self) -> None:
        """Builds the model and reads its weights. Raises `ModelError`."""
        config = self._config
        quantization = self._create_quantization()
        keeper = self._create_keeper(quantization)
        context = ModelContext(
            dtype=getattr(torch, config.model.dtype),
            device=self._device,
            max_model_len=config.model.max_model_len,
            kv_dtype=config.cache.dtype,
            communicator=self._communicator,
            quantization=quantization,
            batch_invariant=config.is_strict,
            operators=self._create_operators(),
            keeper=keeper,
        )
        with torch.inference_mode():
            model = self._plugins.create(config.model_family).create(config.model.hf_config, context)
            reader = self._plugins.create(config.weight_format).open(config.model.files)
            try:
                key = self._restore(keeper, quantization, reader)
                model.load_weights(reader.tensors(self._packed_formats(quantization, reader, keeper)))
            finally:
                reader.close()
            if keeper is not None and key is not None:
                keeper.keep(key)
        self._model, self._context = model, context

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        assert self._runner is not None, "initialize_cache comes before execute"
        return self._runner.execute(plan)

    def call(self, method: str, *args: Any) -> Any:
        """The named operations of the contract."""
        operations: Mapping[str, Any] = {
            "describe": self._describe,
            "initialize_cache": self._initialize_cache,
            "plugin_hash": lambda: self._plugins.plugin_hash,
            "ping": lambda: self._placement.rank,
        }
        if method not in operations:
            raise ConfigError(f"workers have no operation {method!r}; they have {', '.join(operations)}")
        return operations[method](*args)

    def close(self) -> None:
        """Frees weights and KV pages, and leaves the process group."""
        self._model = self._context = self._runner = None
        if self._placement.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _create_quantization(self) -> QuantizationMethod | None:
        component = self._config.quantization
        return None if component is None else self._plugins.create(component, self._config.quantization_need())

    def _create_keeper(self, quantization: QuantizationMethod | None) -> KernelKeeper | None:
        room = int(self._config.model.packed_cache_gib * 2**30)
        if not room or quantization is None or quantization.layout() is None:
            return None
        return KernelKeeper(PackedCache(default_directory(), room))

    def _restore(
        self, keeper: KernelKeeper | None, quantization: QuantizationMethod | None, reader: WeightReader
    ) -> str | None:
        """Restores kept kernels; the key to keep them under where there were none."""
        component = self._config.quantization
        if keeper is None or quantization is None or component is None:
            return None
        made_by = (
            component.reference,
            str(component.version),
            repr(sorted(component.options.items())),
            str(quantization.layout()),
            self._config.model.dtype,
            repr(sorted(self._config.model.hf_config.items(), key=str)),
            f"rank {self._communicator.rank} of {self._communicator.size}",
        )
        return keeper.restore(reader.files(), made_by, quantization.bytes_per_weight())

    def _packed_formats(
        self, quantization: QuantizationMethod | None, reader: WeightReader, keeper: KernelKeeper | None
    ) -> frozenset[str]:
        """Formats in which weights may come packed: those that the method holds, and, since restored kernels pass over
        what they are given, all of them where nothing has to be cut out of packed rows."""
        if keeper is not None and keeper.is_restored and self._communicator.size == 1:
            return reader.packed_formats()
        return quantization.holds if quantization is not None else frozenset()

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
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, int(free - (1 - self._config.cache.memory_fraction) * total))

    def _initialize_cache(self, layout: KVLayout, num_blocks: int, num_host_blocks: int) -> None:
        assert self._context is not None
        assert self._model is not None
        storage = KVStorage(layout, num_blocks, num_host_blocks, self._device)
        environment = detect_environment(self._config.device_type)
        groups = range(len(layout.groups))
        backends = [self._bind_group(layout, group_id, storage, environment) for group_id in groups]
        setup = logits_setup(self._config, self._load_tokenizer())
        processors: dict[str, LogitsProcessor] = {
            name: self._plugins.create(component, setup) for name, component in self._config.logits_processors.items()
        }
        speculation = create_speculation(self._config, self._plugins, self._model, self._context, layout)
        self._runner = ModelRunner(
            self._config, self._model, self._context, layout, storage, backends, processors, speculation
        )

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
            batch_invariant=config.is_strict,
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
            batch_invariant=setup.batch_invariant,
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
