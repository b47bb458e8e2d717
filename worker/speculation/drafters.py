"""The drafters of a worker: created where drafts are made, with models of their own and pages of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dovetail.config.resolved import ResolvedConfig, ResolvedDrafter, ResolvedDraftModel, ResolvedSpeculation
from dovetail.contracts.attention import AttentionBackend, AttentionModule, AttentionSetup, TransientSpec
from dovetail.contracts.draft_target import NamesWeights, ReadsTopTokens, UpdatesWeights
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.kv import KVLayout, KVSpec, LatentSpec
from dovetail.contracts.model import CausalLM
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.speculation import (
    BuildsLayers,
    Draft,
    DraftBatch,
    DraftModel,
    DraftPages,
    DraftSetup,
    DraftWorker,
    KeepsLayers,
    LayerSetup,
    LoadsModel,
)
from dovetail.nn.context import BuildContext
from dovetail.nn.operators import torch_operators
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.attention_binding import bind_layers
from dovetail.worker.draft_tokenizers import DraftTokenizers
from dovetail.worker.input_batch import InputBatch
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.reading import read_module
from dovetail.worker.speculation.draft_sampling import draft_distributions, draft_draw
from dovetail.worker.speculation.stages import HostStage
from dovetail.worker.speculation.target_copy import TargetCopy, target_calls
from dovetail.worker.speculation.target_passes import BatchPasses, pages_batch, proposing
from dovetail.worker.speculation.top_tokens import check_count
from dovetail.worker.weight_update.targets import DrafterTarget, ModuleTarget, UpdateTarget


class BatchPages(DraftPages):
    """`DraftPages` of one drafter. Made with the drafter, of use once the KV memory is there."""

    def __init__(self) -> None:
        self._batch: InputBatch | None = None
        self._group_id = 0
        self._block_size = 0
        self._backends: Sequence[AttentionBackend] = ()

    def bind(self, batch: InputBatch, group_id: int, block_size: int, backends: Sequence[AttentionBackend]) -> None:
        """Uses the block tables of `group_id` in `batch`, and plans all of `backends`, from now on."""
        self._batch, self._group_id, self._block_size, self._backends = batch, group_id, block_size, backends

    def plan(
        self,
        seq_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        tree_masks: Mapping[int, np.ndarray] | None = None,
    ) -> np.ndarray:
        """As `DraftPages.plan`."""
        if self._batch is None:
            raise RuntimeError("a drafter's pages are there from the first `propose` on")
        slots, planned = pages_batch(
            self._batch, self._group_id, self._block_size, seq_ids, starts, counts, tree_masks or {}
        )
        for backend in self._backends:
            backend.plan(planned)
        return slots


@dataclass(frozen=True)
class OwnModel:
    """A drafter's own model, as the host loaded it."""

    module: CausalLM
    context: BuildContext
    """The one in which it was built."""


@dataclass(frozen=True)
class LoadedDrafter:
    """One drafter with its weights."""

    config: ResolvedDrafter
    worker: DraftWorker
    layers: tuple[AttentionModule, ...]
    """Its own attention layers."""
    pages: BatchPages
    dtype: str
    """dtype of its activations."""
    stages: tuple[HostStage, ...] = ()
    """Other drafters that it asks."""
    passes: BatchPasses | None = None
    """Its passes over the target's layers, where it is a `RunsTarget`."""
    own_model: OwnModel | None = None
    """The model of its own that the host loaded; None where it has none."""
    num_top_tokens: int = 0
    """How many of the target's most likely tokens it or a stage of it reads of each row."""

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        """As `DraftWorker.propose`; its stages see the batch too."""
        for stage in self.stages:
            stage.begin(batch)
        try:
            with proposing(self.passes, batch.requests):
                drafts = self.worker.propose(batch)
            for stage in self.stages:
                stage.complete()
        finally:
            for stage in self.stages:
                stage.end()
        return drafts


def wanted_layers(drafters: Mapping[str, LoadedDrafter]) -> tuple[int, ...]:
    """States between the target's layers that some of them wants."""
    return tuple(sorted({layer for drafter in drafters.values() for layer in drafter.config.hidden_layers}))


def load_drafters(
    config: ResolvedConfig,
    section: ResolvedSpeculation,
    plugins: LoadedPlugins,
    model: CausalLM,
    context: BuildContext,
    tokenizers: DraftTokenizers,
    copy: TargetCopy | None = None,
) -> dict[str, LoadedDrafter]:
    """The drafters of a config's `section` with their weights, by name: stages before the drafters that ask them."""
    drafters = section.drafters
    loaded: dict[str, LoadedDrafter] = {}
    for drafter in sorted(drafters.values(), key=lambda one: bool(one.stages)):
        stages = tuple(
            HostStage(one.config, one.worker, drafter.hidden_layers, one.num_top_tokens, one.passes)
            for one in (loaded[label] for label in drafter.stages)
        )
        loaded[drafter.name] = _load_drafter(
            config, section, plugins, drafter, stages, model, context, tokenizers, copy
        )
    return {name: loaded[name] for name in drafters}


def _wants_confidence(drafter: str, section: ResolvedSpeculation, plugins: LoadedPlugins) -> bool:
    """Whether the policy of the drafter's length, or of one that it is a stage of, reads confidences."""
    using = [one for one in section.drafters.values() if one.name == drafter or drafter in one.stages]
    return any(plugins.get(one.length)[0].capabilities.reads_confidence for one in using)


def _load_drafter(
    config: ResolvedConfig,
    section: ResolvedSpeculation,
    plugins: LoadedPlugins,
    drafter: ResolvedDrafter,
    stages: tuple[HostStage, ...],
    model: CausalLM,
    context: BuildContext,
    tokenizers: DraftTokenizers,
    copy: TargetCopy | None,
) -> LoadedDrafter:
    dtype = config.model.dtype if drafter.model is None else drafter.model.dtype
    pages = BatchPages()

    def create_context() -> BuildContext:
        own = _own_context(context, dtype, drafter.kv_dtype or config.cache.dtype, config.model.max_model_len)
        if drafter.quantization is not None:
            own.quantization = plugins.create(drafter.quantization, QuantizationNeed(config.device_type, dtype))
        return own

    own_model = own = None
    if drafter.model is not None:
        model_context = create_context()
        own_model = _load_model(config, plugins, drafter.model, model_context)
        own_model = replace(own_model, tokenizer_json=tokenizers.own.get(drafter.name))
        own = OwnModel(own_model.module, model_context)
    plugin, options = plugins.get(drafter.component)
    passes = BatchPasses(model, context.device) if drafter.runs_target else None
    setup = replace(
        _draft_setup(config, section, drafter, model, context, copy),
        wants_confidence=_wants_confidence(drafter.name, section, plugins),
        tokenizer_json=tokenizers.target if drafter.reads_tokenizer else None,
        stages={stage.name: stage for stage in stages},
        target=passes,
    )
    if issubclass(plugin, (BuildsLayers, LoadsModel, KeepsLayers)):
        setup = LayerSetup(**vars(setup), create_context=create_context, pages=pages, model=own_model)
    with torch.inference_mode():
        worker: DraftWorker = plugins.create(drafter.component, setup)
    layers = tuple(worker.attention_layers()) if isinstance(worker, KeepsLayers) else ()
    if any(isinstance(layer.cache, TransientSpec) for layer in layers):
        raise PluginError(f"speculative.drafters.{drafter.name}: layers that keep nothing cannot guess what comes next")
    if reasons := against_caches(plugin.__name__, drafter.caches, layers):
        raise PluginError(f"speculative.drafters.{drafter.name}: {'; '.join(reasons)}")
    num_top_tokens = max([_num_top_tokens(plugin, options, setup), *(stage.num_top_tokens for stage in stages)])
    return LoadedDrafter(drafter, worker, layers, pages, dtype, stages, passes, own, num_top_tokens)


def update_target(name: str, drafter: LoadedDrafter, plugins: LoadedPlugins) -> UpdateTarget:
    """What an update of a drafter's weights writes to. Raises `RequestError` for one without weights, or whose weights
    cannot be replaced."""
    model, own = drafter.config.model, drafter.own_model
    if model is not None and own is not None:
        return ModuleTarget(plugins, model.family, model.hf_config, own.module, own.context)
    if isinstance(drafter.worker, UpdatesWeights):
        return DrafterTarget(drafter.worker)
    raise RequestError(
        f"the drafter {name!r} ({type(drafter.worker).__name__}) has no weights that can be replaced: update the model,"
        " or make an engine with the new drafter"
    )


def own_weights(drafter: LoadedDrafter) -> Iterable[torch.Tensor | torch.nn.Module]:
    """The weights of a drafter's own: its model's, and what it names itself."""
    if drafter.own_model is not None:
        module: Any = drafter.own_model.module
        yield module
    if isinstance(drafter.worker, NamesWeights):
        yield from drafter.worker.own_weights()


def _draft_setup(
    config: ResolvedConfig,
    section: ResolvedSpeculation,
    drafter: ResolvedDrafter,
    model: CausalLM,
    context: BuildContext,
    copy: TargetCopy | None,
) -> DraftSetup:
    """What every drafter is given of the target."""
    embed, compute_logits = target_calls(model, context, copy)
    return DraftSetup(
        vocab_size=config.model.vocab_size,
        hidden_size=section.hidden_size,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.limits.max_num_seqs,
        num_tokens=drafter.num_tokens,
        device=context.device,
        dtype=context.dtype,
        embed=embed,
        compute_logits=compute_logits,
        num_layers=config.model.size.num_layers,
        distributions=draft_distributions,
        draw=draft_draw,
    )


def _num_top_tokens(plugin: type[DraftWorker], options: Any, setup: DraftSetup) -> int:
    """How many of the target's most likely tokens a drafter reads of each row, its stages left out."""
    if not issubclass(plugin, ReadsTopTokens):
        return 0
    return check_count(plugin.__name__, plugin.num_top_tokens(options), setup.vocab_size)


def against_caches(drafter: str, announced: Sequence[KVSpec], layers: Sequence[AttentionModule]) -> list[str]:
    """Compares what a drafter's `caches` announced with the layers that it built, in any order. Windows are left out:
    configs may not tell of them, and without one nothing is underestimated. Returns a sentence for each difference."""
    said = Counter(map(_without_window, announced))
    built = Counter(_without_window(layer.cache) for layer in layers)
    return [
        f"{drafter}'s caches() announces {said[spec]} attention layers that cache {_described(spec)} in {spec.dtype},"
        f" and its attention_layers() names {built[spec]}: correct its caches()"
        for spec in said | built
        if said[spec] != built[spec]
    ]


def _without_window(spec: KVSpec) -> KVSpec:
    return spec if isinstance(spec, LatentSpec) else replace(spec, window=None)


def _described(spec: KVSpec) -> str:
    if isinstance(spec, LatentSpec):
        return f"latent vectors of {spec.latent_size} + {spec.rotary_size} elements"
    return f"{spec.num_kv_heads} heads of {spec.head_size} elements"


def _own_context(target: BuildContext, dtype: str, kv_dtype: str, max_model_len: int) -> BuildContext:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return BuildContext(
        dtype=torch_dtype,
        device=target.device,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype,
        batch_invariant=target.batch_invariant,
        # The target's set was asked about the target's dtype.
        operators=target.operators if torch_dtype == target.dtype else torch_operators(),
    )


def _load_model(
    config: ResolvedConfig, plugins: LoadedPlugins, model: ResolvedDraftModel, context: BuildContext
) -> DraftModel:
    if model.quantization is not None:
        context.quantization = plugins.create(model.quantization, model.quantization_need(config.device_type))
    context.max_model_len = min(model.max_model_len, config.model.max_model_len)
    module, _ = read_module(
        plugins, model.family, model.hf_config, model.size, context, model.weight_format, model.files
    )
    return DraftModel(module, context.attention_layers, context.max_model_len, vocab_size=model.size.vocab_size)


def bind_drafters(
    config: ResolvedConfig,
    plugins: LoadedPlugins,
    drafters: Mapping[str, LoadedDrafter],
    layout: KVLayout,
    storage: KVStorage,
    batch: InputBatch,
    environment: Environment,
    target_backends: Mapping[int, AttentionBackend],
) -> None:
    """Gives the layers of each drafter their backend and pages, and each drafter the block tables of `batch`.
    `target_backends`: those of the target's layers, by KV group."""
    for drafter in drafters.values():
        if drafter.passes is not None:
            drafter.passes.bind(batch, layout.block_size, target_backends)
    for tensors in layout.extra_tensors:
        if tensors.owner in drafters:
            drafter = drafters[tensors.owner]
            backends = _bind_drafter(config, plugins, drafter, storage, environment)
            drafter.pages.bind(batch, tensors.group_id, layout.block_size, backends)


def _bind_drafter(
    config: ResolvedConfig,
    plugins: LoadedPlugins,
    drafter: LoadedDrafter,
    storage: KVStorage,
    environment: Environment,
) -> Sequence[AttentionBackend]:
    """One backend for each kind of cache among the drafter's layers."""
    kinds: dict[KVSpec, list[int]] = {}
    for index, layer in enumerate(drafter.layers):
        kinds.setdefault(layer.cache, []).append(index)
    limits, attention = config.limits, drafter.config.attention
    assert attention is not None
    backends = []
    for spec, indices in kinds.items():
        layers = [drafter.layers[index] for index in indices]
        setup = AttentionSetup(
            layers=tuple(layer.layer for layer in layers),
            spec=spec,
            block_size=config.cache.block_size,
            dtype=drafter.dtype,
            device=str(storage.device),
            max_num_seqs=limits.max_num_seqs,
            # What the target computed and the token that it drew, or all nodes of every request's tree.
            max_num_batched_tokens=limits.max_num_seqs
            + max(limits.max_num_batched_tokens, limits.max_num_seqs * (drafter.config.num_tokens + 1)),
            max_model_len=config.model.max_model_len,
            batch_invariant=config.is_strict,
        )

        def view(index: int, spec: KVSpec, backend: AttentionBackend, own: list[int] = indices) -> torch.Tensor:
            return storage.extra_view(drafter.config.name, own[index], spec, backend)

        whose = f"the drafter {drafter.config.name!r}'s"
        backends.append(bind_layers(plugins, attention, layers, setup, environment, view, whose=whose))
    return backends
