"""The rules about speculation: which drafters, what each of them owns, the default one, and the acceptance rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dovetail.config.resolved import Component, ResolvedDrafter, ResolvedSpeculation
from dovetail.config.schema import AUTO, OFF, ComponentSection, SpeculativeSection
from dovetail.config.tree import KeyPath, dotted, nearest
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.draft_length import LengthNeed
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.kv import KVSpec, LatentSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.speculation import (
    AcceptanceNeed,
    BuildsLayers,
    DraftWorker,
    KeepsLayers,
    LoadsModel,
    ReadsHiddenLayers,
    ReadsTokenizer,
    SpeculationNeed,
    TreesByOption,
)
from dovetail.engine.resolving.choose import Chosen, Question, choose
from dovetail.engine.resolving.draft_length import choose_length
from dovetail.engine.resolving.draft_model import DraftModelScope, as_model_section
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import ACCEPTANCE, DRAFT_ATTENTION, DRAFT_QUANTIZATION, DRAFTER


def choose_speculation(
    state: Resolution, target: ChosenModel, kv_dtype: str
) -> tuple[ResolvedSpeculation | None, bool]:
    """Drafters and acceptance rule, and whether some drafter proposes trees."""
    section = state.config.speculative
    if section is None:
        return None, False
    need = SpeculationNeed(
        device_type=state.environment.device_type,
        dtype=target.dtype,
        vocab_size=target.size.vocab_size,
        hidden_size=target.size.hidden_size,
        tensor_parallel=state.config.executor.tensor_parallel,
        num_tokens=max(drafter.num_tokens for drafter in section.drafters.values()),
        num_layers=target.size.num_layers,
        kv_dtype=kv_dtype,
        gives_hidden_layers=target.family.plugin.capabilities.hidden_layers,
        has_tokenizer_json=state.config.model.tokenizer_mode == AUTO,
    )
    drafters = {name: _choose_drafter(state, section, name, need, target) for name in section.drafters}
    trees = any(_is_tree_drafter(chosen) for chosen, _ in drafters.values())
    judged = AcceptanceNeed(need.device_type, need.vocab_size, need.num_tokens, trees=trees, lossless=state.is_strict)
    acceptance = choose(state, ACCEPTANCE, judged).component
    resolved = {name: drafter for name, (_, drafter) in drafters.items()}
    speculation = ResolvedSpeculation(
        resolved,
        _default_drafter(state, section),
        acceptance,
        section.disable_by_batch_size,
        section.disable_logprobs,
        need.hidden_size,
    )
    return speculation, trees


def _choose_drafter(
    state: Resolution, section: SpeculativeSection, name: str, need: SpeculationNeed, target: ChosenModel
) -> tuple[Chosen[DraftWorker], ResolvedDrafter]:
    if name == OFF:
        raise ConfigError(
            f"speculative.drafters.{name}: requests say {OFF!r} to go without a drafter; name it otherwise"
        )
    drafter = section.drafters[name]
    path = ("speculative", "drafters", name)
    scope = DraftModelScope(state, path, target)

    def own_need() -> SpeculationNeed:
        """What is asked of this drafter, once its model is known."""
        dtype = target.dtype if scope.info is None else scope.info.dtype
        own_kv_dtype = dtype if state.config.cache.dtype == AUTO else need.kv_dtype
        return replace(need, num_tokens=drafter.num_tokens, kv_dtype=own_kv_dtype, model=scope.info)

    def against(plugin: type[DraftWorker], options: PluginOptions) -> Sequence[str]:
        asked = plugin.model_section(options) if issubclass(plugin, LoadsModel) else None
        if asked is not None:
            scope.resolve(asked)
        return reasons_against(plugin, own_need(), options, state.environment)

    chosen = Question(state, DRAFTER.at(name), need, ask=against).choose()
    scope.apply()
    _refuse_attention(state, path, chosen)
    final = own_need()
    specs = _draft_caches(chosen, final)
    dtype = target.dtype if scope.info is None else scope.info.dtype
    trees = _is_tree_drafter(chosen)
    attention = _choose_draft_attention(state, path, specs, dtype, trees=trees) if specs else None
    return chosen, ResolvedDrafter(
        name,
        chosen.component,
        drafter.num_tokens,
        choose_length(state, name, drafter, _length_need(chosen, drafter.num_tokens)),
        attention=attention,
        kv_dtype=final.kv_dtype,
        model=scope.model,
        quantization=_choose_draft_quantization(state, path, chosen, dtype),
        hidden_layers=_hidden_layers(chosen, final),
        reads_next_token=chosen.plugin.capabilities.reads_next_token,
        trees=trees,
        caches=specs,
        reads_tokenizer=_reads_tokenizer(chosen),
    )


def _length_need(drafter: Chosen[DraftWorker], num_tokens: int) -> LengthNeed:
    can = drafter.plugin.capabilities
    return LengthNeed(
        num_tokens=num_tokens,
        gives_confidence=can.confidence or can.probabilities,
        trees=_is_tree_drafter(drafter),
    )


def _is_tree_drafter(drafter: Chosen[DraftWorker]) -> bool:
    plugin = drafter.plugin
    if not issubclass(plugin, TreesByOption):
        return plugin.capabilities.trees
    with drafter.calling("proposes_trees"):
        return plugin.proposes_trees(drafter.options) and plugin.capabilities.trees


def _reads_tokenizer(drafter: Chosen[DraftWorker]) -> bool:
    plugin = drafter.plugin
    if not issubclass(plugin, ReadsTokenizer):
        return False
    with drafter.calling("reads_tokenizer"):
        return plugin.reads_tokenizer(drafter.options)


def _default_drafter(state: Resolution, section: SpeculativeSection) -> str | None:
    names = list(section.drafters)
    asked = section.default
    if asked is None or asked in section.drafters:
        return asked
    origin = state.layered.origin("speculative.default")
    if asked != AUTO:
        raise ConfigError(
            f"speculative.default {asked!r} ({origin}) is no drafter of the config; {nearest(asked, names)}"
        )
    if len(names) > 1:
        raise ConfigError(
            f"speculative.default: which of {', '.join(names)} should requests get that name none? Write one, or null"
        )
    state.decide("speculative.default", names[0], "the only drafter")
    return names[0]


def _choose_draft_quantization(
    state: Resolution, path: KeyPath, drafter: Chosen[DraftWorker], dtype: str
) -> Component | None:
    """How the layers that a drafter builds by itself hold their weights; None: in full precision."""
    plugin = drafter.plugin
    if not issubclass(plugin, BuildsLayers):
        return None
    with drafter.calling("quantization"):
        asked = plugin.quantization(drafter.options)
    if asked is None:
        return None
    section = as_model_section(path, {"quantization": asked}).quantization
    assert section is not None
    inner = state.within(path, state.config.model.model_copy(update={"quantization": section}))
    need = QuantizationNeed(state.environment.device_type, dtype)
    otherwise = "no method for drafters serves here"
    try:
        method = Question(inner, DRAFT_QUANTIZATION, need).choose_or_none(otherwise)
    except DovetailError as error:
        raise type(error)(f"{dotted(path)}, its own layers: {error}") from error
    state.adopt_decisions(inner, path)
    state.take_warnings(inner, dotted(path))
    return None if method is None else method.component


def _refuse_attention(state: Resolution, path: KeyPath, chosen: Chosen[DraftWorker]) -> None:
    """Raises `ConfigError` for the attention backend of a drafter that has no layers."""
    if not issubclass(chosen.plugin, KeepsLayers) and state.section((*path, "attention")) is not None:
        key = dotted((*path, "attention"))
        raise ConfigError(
            f"{key} ({state.layered.origin(key)}): the drafter {chosen.component.name!r} has no attention layers of its"
            " own; remove it"
        )


def _choose_draft_attention(
    state: Resolution,
    path: KeyPath,
    specs: Sequence[KVSpec],
    dtype: str,
    *,
    trees: bool,
) -> Component:
    """The attention backend of a drafter's own layers, which cache `specs`, for queries of `dtype`."""
    need = AttentionNeed(
        device_type=state.environment.device_type,
        dtype=dtype,
        block_size=state.config.cache.block_size,
        head_sizes=frozenset(spec.head_size for spec in specs),
        sliding_window=any(spec.window is not None for spec in specs),
        trees=trees,
        batch_invariant=state.is_strict,
        kv_dtype=specs[0].dtype,
        latents=any(isinstance(spec, LatentSpec) for spec in specs),
    )
    slot = DRAFT_ATTENTION.at(path[-1])
    return choose(state, slot, need, section=state.section(slot.path) or ComponentSection()).component


def _draft_caches(chosen: Chosen[DraftWorker], need: SpeculationNeed) -> tuple[KVSpec, ...]:
    """What the drafter's layers will cache; empty for one without layers. Raises `PluginError` for a drafter that
    contradicts itself."""
    plugin = chosen.plugin
    if not issubclass(plugin, KeepsLayers):
        return ()
    with chosen.calling("caches"):
        specs = tuple(plugin.caches(chosen.options, need))
    if not specs:
        raise PluginError(f"drafter {chosen.component.name!r} is a KeepsLayers, but its caches() names no layer")
    return specs


def _hidden_layers(chosen: Chosen[DraftWorker], need: SpeculationNeed) -> tuple[int, ...]:
    """The states between the target's layers that the drafter wants. Raises `ConfigError` where the target's family
    does not hand them out."""
    name = chosen.component.name
    plugin = chosen.plugin
    layers: tuple[int, ...] = ()
    if issubclass(plugin, ReadsHiddenLayers):
        with chosen.calling("hidden_layers"):
            layers = tuple(plugin.hidden_layers(chosen.options, need))
    if layers and not need.gives_hidden_layers:
        raise ConfigError(
            f"drafter {name!r} needs the states between the target's layers ({', '.join(map(str, layers))}), which the "
            "target's model family does not hand out; choose another drafter, or a family that does "
            "(capability `hidden_layers`)"
        )
    if any(not 0 <= layer <= need.num_layers for layer in layers):
        raise ConfigError(
            f"drafter {name!r} needs the states that enter the target's layers {', '.join(map(str, layers))}; the"
            f" target has {need.num_layers} layers, so the drafter was made for another"
        )
    return layers


def note_lengths(state: Resolution, drafters: Iterable[ResolvedDrafter], max_model_len: int) -> None:
    """Warns of draft models that end before the target does."""
    for drafter in drafters:
        if drafter.model is not None and drafter.model.max_model_len < max_model_len:
            state.warn(
                f"drafter {drafter.name!r} has {drafter.model.max_model_len} positions, the target {max_model_len}: it"
                " drafts nothing beyond them"
            )
