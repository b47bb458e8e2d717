"""The model of one rank with its weights: what its layers cache, how much memory it leaves, and its weights again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dovetail.contracts.attention import AttentionBackend, AttentionModule, AttentionSetup, TransientSpec
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.executor import WorkerReport
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.model import CausalLM
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.nn.context import BuildContext
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.operators import torch_operators
from dovetail.nn.packed_cache import PackedCache, default_directory
from dovetail.worker.adapters.slots import WorkerAdapters, create_adapter_space
from dovetail.worker.attention_binding import PageView, bind_layers, no_pages
from dovetail.worker.capturable import why_not_captured
from dovetail.worker.forward import EagerForward, ModelPass, compiled, create_graphs, model_pass, wants_graphs
from dovetail.worker.input_batch import NO_GROUP
from dovetail.worker.kv_layout import build_layout
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.machine.environment import detect_environment
from dovetail.worker.memory import check_weights_fit, kv_bytes
from dovetail.worker.pooling.head import ScoreHead
from dovetail.worker.reading import CheckpointMarks, current_marks, read_module, read_parts, read_weights
from dovetail.worker.speculation.loaded import LoadedSpeculation, load_speculation
from dovetail.worker.stage_link import PassedOn, create_link
from dovetail.worker.weight_update.targets import ModuleTarget, UpdateTarget
from dovetail.worker.worker_setup import WorkerSetup


def load_model(setup: WorkerSetup) -> LoadedModel:
    """Builds the model and reads its weights. Raises `ModelError`, and `CapacityError` for a device that cannot hold
    them."""
    config = setup.config
    check_weights_fit(config, setup.device)
    quantization = _create_quantization(setup)
    context = BuildContext(
        dtype=getattr(torch, config.model.dtype),
        device=setup.torch_device,
        max_model_len=config.model.max_model_len,
        kv_dtype=config.cache.dtype,
        communicator=setup.communicator,
        quantization=quantization,
        batch_invariant=config.is_strict,
        operators=_create_operators(setup),
        keeper=_create_keeper(setup, quantization),
        adapters=create_adapter_space(config.lora, setup.torch_device),
        layers=config.layers_of_stage(setup.placement.stage),
        is_first_stage=setup.placement.stage == 0,
        is_last_stage=setup.placement.stage == setup.placement.num_stages - 1,
    )
    labels = 0 if config.model.size.num_labels else config.pooling.num_labels  # some modules have a head of their own
    labels = labels if context.is_last_stage else 0
    head = ScoreHead(labels, config.model.size.hidden_size, setup.torch_device) if labels else None
    model, marks = read_module(
        setup.plugins,
        config.model_family,
        config.model.hf_config,
        config.model.size,
        context,
        config.weight_format,
        config.model.files,
        head,
    )
    speculation = load_speculation(
        config, setup.plugins, model, context, setup.tokenizers, answers=setup.placement.answers
    )
    return LoadedModel(setup, model, context, speculation, marks, head)


class LoadedModel:
    """Made by `load_model`."""

    def __init__(
        self,
        setup: WorkerSetup,
        model: CausalLM,
        context: BuildContext,
        speculation: LoadedSpeculation,
        marks: CheckpointMarks,
        head: ScoreHead | None = None,
    ):
        """`marks`: of the checkpoint that the weights are from. `head`: None where the checkpoint has none."""
        self.head = head
        self.setup = setup
        self.model = model
        self.context = context
        self.speculation = speculation
        self.adapters = _create_adapters(setup, context)
        """None where the config has none."""
        hidden_size, num_own = setup.config.model.size.hidden_size, len(speculation.hidden_layers)
        passed = PassedOn(hidden_size, context.dtype, speculation.num_earlier_states, num_own)
        self.link = create_link(setup.placement, passed, context.device)
        self._marks = marks
        self._is_updated = False
        """Whether the weights are not those of the checkpoint any more."""

    @functools.cached_property
    def forward(self) -> ModelPass:
        """A pass of the model, compiled where the executor asks for it, which happens once."""
        runtime = self.setup.placement.runtime
        mode = runtime.compile_mode if runtime is not None else None
        run = model_pass(self.model, self.speculation.hidden_layers, is_first_stage=self.context.is_first_stage)
        return compiled(self.model, run, mode)

    @property
    def query_lens(self) -> list[int]:
        """Query tokens of a request in decode and verify steps."""
        return sorted({1, self.speculation.max_query_len})

    def why_not_captured(self, backends: Mapping[int, AttentionBackend]) -> str | None:
        """Why steps over these backends cannot be captured in graphs; None: they can."""
        family, _ = self.setup.plugins.get(self.setup.config.model_family)
        return why_not_captured(family, self.model, self.context, backends.values())

    def report(self) -> WorkerReport:
        """What the layers cache, and the bytes that are left for it."""
        return WorkerReport(
            placement=self.setup.placement,
            caches=tuple(layer.cache for layer in self.context.attention_layers),
            available_bytes=self._available_bytes(),
            extra_caches=self.speculation.extra_caches,
        )

    def bind(self, layout: KVLayout, storage: KVStorage) -> dict[int, AttentionBackend]:
        """Gives the model's own layers their pages. Returns their backends by KV group; none for a group that has
        layers of others alone, and one under `NO_GROUP` for layers that keep nothing."""
        environment = detect_environment(self.setup.config.device_type)
        backends = {}
        for group in layout.groups:
            if group.layer_ids:
                layers = [self.context.attention_layers[layer_id] for layer_id in group.layer_ids]
                backends[group.group_id] = self._bind_layers(layers, environment, storage.view)
        if layers := [layer for layer in self.context.attention_layers if isinstance(layer.cache, TransientSpec)]:
            backends[NO_GROUP] = self._bind_layers(layers, environment, no_pages)
        return backends

    def check_checkpoint(self) -> None:
        """Raises `ModelError` where the checkpoint is not the one that was read."""
        config = self.setup.config
        if self._is_updated:
            raise ModelError(
                "the weights were updated after they were read, so the checkpoint does not hold what slept: take the"
                " checkpoint's with wake_up(new_weights=True), or sleep at level 1, which keeps them"
            )
        marks = current_marks(self.setup.plugins, config.weight_format, config.model.files)
        changed = marks.changed_files(self._marks)
        if changed:
            raise ModelError(
                f"the checkpoint is not the one that was loaded: {', '.join(changed[:4])} changed meanwhile. Put it"
                " back, or take the new weights with wake_up(new_weights=True)"
            )

    def read_weights(self) -> None:
        """Again, into the memory that the weights had before. Raises `ModelError`."""
        config = self.setup.config
        self._marks = read_weights(
            self.setup.plugins, self.model, self.context, config.weight_format, config.model.files, self.head
        )
        copy = self.speculation.copy
        if copy is not None:
            read_parts(self.setup.plugins, copy.module, copy.context, config.weight_format, config.model.files)
        self._is_updated = False
        self.speculation.target_changed()

    @property
    def weights(self) -> torch.nn.Module:
        """The modules whose weights are the model's: itself, and copies of parts of it."""
        modules: list[Any] = [self.model]
        if self.speculation.copy is not None:
            modules.append(self.speculation.copy.module)
        return torch.nn.ModuleList(modules)

    def update_targets(self) -> Sequence[UpdateTarget]:
        """What an update of the model's weights writes to: the model, and copies of parts of it."""
        config, plugins, copy = self.setup.config, self.setup.plugins, self.speculation.copy
        family, hf_config = config.model_family, config.model.hf_config
        targets = [ModuleTarget(plugins, family, hf_config, self.model, self.context, self.head)]
        if copy is not None:
            targets.append(ModuleTarget(plugins, family, hf_config, copy.module, copy.context))
        return targets

    def weights_replaced(self) -> None:
        """Other weights were written than those of the checkpoint."""
        self._is_updated = True
        self.speculation.target_changed()

    def _available_bytes(self) -> int:
        cache = self.setup.config.cache
        if cache.memory_bytes is not None:
            return cache.memory_bytes
        if cache.num_blocks is not None:
            return 0  # the config counts blocks itself, and nobody asks
        return self._profiled_bytes()

    def _profiled_bytes(self) -> int:
        """What the largest step leaves of the device's memory: it is run once, over a cache of one page."""
        from dovetail.worker.largest_step import LargestStep, largest_inputs  # most starts do without

        device, config, context = self.setup.device, self.setup.config, self.context
        layout = build_layout([layer.cache for layer in context.attention_layers], config.cache.block_size)
        backends = self.bind(layout, KVStorage(layout, 1, 0, self.setup.torch_device))
        largest = LargestStep(
            self.model,
            EagerForward(self.forward, backends),
            largest_inputs(config.limits, config.model.max_model_len, layout, has_adapters=self.adapters is not None),
            config.limits,
            config.model.vocab_size,
            context.operators,
            judged_rows=self.speculation.largest_rows,
            link=self.link,
            has_processors=bool(config.logits_processors),
        )
        peak = device.measure(partial(largest.run, self.setup.torch_device))
        device.release_unused()
        graphs = self._graph_bytes(backends)
        return kv_bytes(device.memory(), config.cache.memory_fraction, peak, graphs)

    def _graph_bytes(self, backends: Mapping[int, AttentionBackend]) -> int:
        """What captured graphs will take; 0 where none will be."""
        runtime, limits = self.setup.placement.runtime, self.setup.config.limits
        if runtime is None or not wants_graphs(runtime) or self.why_not_captured(backends) is not None:
            return 0
        graphs = create_graphs(
            self.setup.device,
            runtime,
            self.forward,
            backends,
            limits,
            self.query_lens,
            self.link,
            has_adapters=self.adapters is not None,
        )
        try:
            return graphs.measure()
        except ConfigError:  # the device captures nothing, which `create_forward` says or refuses
            return 0

    def _bind_layers(
        self, layers: Sequence[AttentionModule], environment: Environment, view: PageView
    ) -> AttentionBackend:
        """Creates the backend of the layers of one KV group, or of those that keep nothing, and hands each of them the
        backend and its pages."""
        config = self.setup.config
        attention = AttentionSetup(
            layers=tuple(layer.layer for layer in layers),
            spec=layers[0].cache,
            block_size=config.cache.block_size,
            dtype=config.model.dtype,
            device=str(self.setup.torch_device),
            max_num_seqs=config.limits.max_num_seqs,
            max_num_batched_tokens=config.limits.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
            batch_invariant=config.is_strict,
        )
        plugins = self.setup.plugins
        return bind_layers(plugins, config.attention, layers, attention, environment, view, whose="this model's")


def _create_adapters(setup: WorkerSetup, context: BuildContext) -> WorkerAdapters | None:
    lora = setup.config.lora
    if lora is None or context.adapters is None:
        return None
    return WorkerAdapters(context.adapters, setup.device, lora.max_cpu_loras)


def _create_quantization(setup: WorkerSetup) -> QuantizationMethod | None:
    component = setup.config.quantization
    return None if component is None else setup.plugins.create(component, setup.config.quantization_need())


def _create_keeper(setup: WorkerSetup, quantization: QuantizationMethod | None) -> KernelKeeper | None:
    config = setup.config
    budget, component = int(config.model.packed_cache_gib * 2**30), config.quantization
    if not budget or quantization is None or component is None:
        return None
    formats = quantization.need.packed_formats
    made_by = (
        *map(setup.plugins.identity, (component, config.weight_format, config.model_family)),
        config.model.dtype,
        repr(sorted(config.model.hf_config.items(), key=str)),
    )
    return KernelKeeper(
        PackedCache(default_directory(), budget),
        made_by,
        (setup.placement.position, setup.placement.layout.num_ranks),
        lambda shape: quantization.describe(shape).least_bytes_per_weight(formats),
    )


def _create_operators(setup: WorkerSetup) -> Operators:
    component = setup.config.operators
    return torch_operators() if component is None else setup.plugins.create(component)
