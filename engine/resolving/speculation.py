"""The rules about speculation: which drafters, what each of them owns, the default one, and the acceptance rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dovetail.config.layers import DEFAULT
from dovetail.config.resolved import Component, ResolvedDrafter, ResolvedDraftModel, ResolvedSpeculation
from dovetail.config.schema import AUTO, OFF, ComponentSection, DrafterSection, SpeculativeSection
from dovetail.config.tree import KeyPath, dotted, nearest
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.draft_length import LengthNeed
from dovetail.contracts.draft_stages import ComposesDrafters, StageAbilities, with_stages
from dovetail.contracts.draft_target import CallsTarget, RunsTarget, TargetParts
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.kv import KVSpec, LatentSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.speculation import (
    AcceptanceNeed,
    BuildsLayers,
    DraftCapabilities,
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
from dovetail.engine.resolving.draft_stages import refuse_nested, refuse_stages
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import ACCEPTANCE, DRAFT_ATTENTION, DRAFT_QUANTIZATION, DRAFTER, RULE
from dovetail.engine.resolving.stages import refuse_over_stages


def choose_speculation(
    state: Resolution, target: ChosenModel, kv_dtype: str, stage_layers: Sequence[int]
) -> tuple[ResolvedSpeculation | None, bool]:
    """Drafters and acceptance rule, and whether some drafter proposes trees. `stage_layers`: of each pipeline stage;
    empty for one."""
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
        skips_layers=target.family.plugin.capabilities.skips_layers,
        has_tokenizer_json=state.config.model.tokenizer_mode == AUTO,
    )
    resolved = _Drafters(state, section, need, target).all()
    refuse_over_stages(stage_layers, resolved)
    _refuse_copies(state, target, resolved)
    trees = any(drafter.trees for drafter in resolved.values())
    judged = AcceptanceNeed(need.device_type, need.vocab_size, need.num_tokens, trees=trees, lossless=state.is_strict)
    acceptance = choose(state, ACCEPTANCE, judged).component
    speculation = ResolvedSpeculation(
        resolved,
        _default_drafter(state, section, resolved),
        acceptance,
        section.disable_by_batch_size,
        section.disable_logprobs,
        need.hidden_size,
        # Whether a rule serves the drafts of a request is known with the request.
        {name: choose(state, RULE.at(name), replace(judged, trees=False)).component for name in section.rules},
    )
    return speculation, trees


class _Drafters:
    """The drafters of a config, each resolved once: as a stage of another one before that one."""

    def __init__(self, state: Resolution, section: SpeculativeSection, need: SpeculationNeed, target: ChosenModel):
        self._state = state
        self._section = section
        self._need = need
        self._target = target
        self._resolved: dict[str, ResolvedDrafter] = {}
        self._under_way: list[str] = []

    def all(self) -> dict[str, ResolvedDrafter]:
        """By label, in the config's order."""
        return {name: self._drafter(name) for name in self._section.drafters}

    def _drafter(self, name: str) -> ResolvedDrafter:
        if name not in self._resolved:
            self._under_way.append(name)
            self._resolved[name] = self._choose(name)
            self._under_way.pop()
        return self._resolved[name]

    def _stages(self, plugin: type[DraftWorker], options: PluginOptions) -> dict[str, ResolvedDrafter]:
        """The stages of a drafter that is asked, the one that is under way last. Raises `ConfigError`."""
        if not issubclass(plugin, ComposesDrafters):
            return {}
        name = self._under_way[-1]
        labels = list(plugin.stages(options))
        refuse_stages(name, plugin, labels, self._section, self._under_way)
        stages = {label: self._drafter(label) for label in labels}
        refuse_nested(name, stages.values())
        return stages

    def _choose(self, name: str) -> ResolvedDrafter:
        if name == OFF:
            raise ConfigError(f"{_key(name)}: requests say {OFF!r} to go without a drafter; name it otherwise")
        state, target = self._state, self._target
        drafter = self._section.drafters[name]
        path = ("speculative", "drafters", name)
        scope = DraftModelScope(state, path, target)
        stages: dict[str, ResolvedDrafter] = {}

        def own_need() -> SpeculationNeed:
            """What is asked of this drafter, once its model and its stages are known."""
            dtype = target.dtype if scope.info is None else scope.info.dtype
            return replace(
                self._need,
                num_tokens=self._num_tokens(name, stages.values()),
                kv_dtype=dtype if state.config.cache.dtype == AUTO else self._need.kv_dtype,
                model=scope.info,
                stages={label: StageAbilities(stage.abilities, stage.num_tokens) for label, stage in stages.items()},
            )

        def against(plugin: type[DraftWorker], options: PluginOptions) -> Sequence[str]:
            asked = plugin.model_section(options) if issubclass(plugin, LoadsModel) else None
            if asked is not None:
                scope.resolve(asked)
            stages.update(self._stages(plugin, options))
            return reasons_against(plugin, own_need(), options, state.environment)

        chosen = Question(state, DRAFTER.at(name), self._need, ask=against).choose()
        scope.apply()
        _note_num_tokens(state, name, drafter, self._num_tokens(name, stages.values()), stages.values())
        return _resolved_drafter(state, drafter, name, chosen, own_need(), scope.model, stages)

    def _num_tokens(self, name: str, stages: Collection[ResolvedDrafter]) -> int:
        """Of a drafter with stages whose section says nothing, as many as the stage with the most."""
        asked = self._section.drafters[name].num_tokens
        if not stages or self._state.layered.origin(f"{_key(name)}.num_tokens") != DEFAULT:
            return asked
        return max(stage.num_tokens for stage in stages)


def _key(name: str) -> str:
    return f"speculative.drafters.{name}"


def _note_num_tokens(
    state: Resolution, name: str, section: DrafterSection, num_tokens: int, stages: Iterable[ResolvedDrafter]
) -> None:
    """Notes the number that the stages gave, and warns of stages that another number cuts short."""
    if num_tokens != section.num_tokens:
        state.decide(f"{_key(name)}.num_tokens", num_tokens, "the most of its stages")
    for stage in stages:
        if stage.num_tokens > num_tokens:
            state.warn(
                f"drafter {name!r} drafts {num_tokens} tokens at most, and its stage {stage.name!r} up to"
                f" {stage.num_tokens}, which are cut: raise {_key(name)}.num_tokens, or leave it out"
            )


def _resolved_drafter(
    state: Resolution,
    section: DrafterSection,
    name: str,
    chosen: Chosen[DraftWorker],
    need: SpeculationNeed,
    model: ResolvedDraftModel | None,
    stages: Mapping[str, ResolvedDrafter],
) -> ResolvedDrafter:
    path = ("speculative", "drafters", name)
    _refuse_attention(state, path, chosen)
    specs = _draft_caches(chosen, need)
    dtype = need.dtype if need.model is None else need.model.dtype
    own = replace(chosen.plugin.capabilities, trees=_is_tree_drafter(chosen))
    abilities = with_stages(own, [stage.abilities for stage in stages.values()])
    own_layers = _hidden_layers(chosen, need)
    return ResolvedDrafter(
        name,
        chosen.component,
        need.num_tokens,
        choose_length(state, name, section, _length_need(abilities, need.num_tokens)),
        attention=_choose_draft_attention(state, path, specs, dtype, trees=own.trees) if specs else None,
        kv_dtype=need.kv_dtype,
        model=model,
        quantization=_choose_draft_quantization(state, path, chosen, dtype),
        # Where there are stages, own ones were refused.
        hidden_layers=own_layers or tuple(sorted({i for stage in stages.values() for i in stage.hidden_layers})),
        reads_next_token=abilities.reads_next_token,
        trees=abilities.trees,
        caches=specs,
        reads_tokenizer=_reads_tokenizer(chosen),
        abilities=abilities,
        stages=tuple(stages),
        stages_keep_layers=any(stage.kv_cache for stage in stages.values()),
        runs_target=_runs_target(chosen, need) or any(stage.runs_target for stage in stages.values()),
        target_parts=_target_parts(chosen, need),
    )


def _length_need(can: DraftCapabilities, num_tokens: int) -> LengthNeed:
    return LengthNeed(num_tokens=num_tokens, gives_confidence=can.confidence or can.probabilities, trees=can.trees)


def _is_tree_drafter(drafter: Chosen[DraftWorker]) -> bool:
    plugin = drafter.plugin
    if not issubclass(plugin, TreesByOption):
        return plugin.capabilities.trees
    with drafter.calling("proposes_trees"):
        return plugin.proposes_trees(drafter.options) and plugin.capabilities.trees


def _runs_target(drafter: Chosen[DraftWorker], need: SpeculationNeed) -> bool:
    """Raises `ConfigError` where the drafter wants some of the target's layers to run and that cannot be."""
    if not issubclass(drafter.plugin, RunsTarget):
        return False
    name = drafter.component.name
    if not need.skips_layers:
        raise ConfigError(
            f"drafter {name!r} guesses with some of the target's own layers, and the target's model family runs all or "
            "none; choose another drafter, or a family that leaves layers out (capability `skips_layers`)"
        )
    if need.tensor_parallel > 1:
        raise ConfigError(
            f"drafter {name!r} runs the target's layers, which {need.tensor_parallel} tensor-parallel ranks share, and "
            "drafters run on one: set executor.tensor_parallel to 1, or choose another drafter"
        )
    return True


def _target_parts(drafter: Chosen[DraftWorker], need: SpeculationNeed) -> TargetParts:
    plugin = drafter.plugin
    if not issubclass(plugin, CallsTarget):
        return TargetParts()
    with drafter.calling("target_parts"):
        return plugin.target_parts(drafter.options, need)


def _refuse_copies(state: Resolution, target: ChosenModel, drafters: Mapping[str, ResolvedDrafter]) -> None:
    """Raises `ConfigError` for drafters that call parts of the target that no rank holds, where the model family cannot
    build these alone."""
    executor = state.config.executor
    if executor.tensor_parallel == 1 or target.family.plugin.capabilities.stages:
        return
    for drafter in drafters.values():
        if drafter.target_parts:
            raise ConfigError(
                f"{_key(drafter.name)} ({drafter.component.name}): it calls the target's embedding or output layer,"
                f" which {executor.tensor_parallel} tensor-parallel ranks hold in parts, and the model family"
                f" {target.family.component.name} builds no whole copy of them (capability `stages`); set"
                " executor.tensor_parallel to 1, or choose another drafter"
            )


def _reads_tokenizer(drafter: Chosen[DraftWorker]) -> bool:
    plugin = drafter.plugin
    if not issubclass(plugin, ReadsTokenizer):
        return False
    with drafter.calling("reads_tokenizer"):
        return plugin.reads_tokenizer(drafter.options)


def _default_drafter(
    state: Resolution, section: SpeculativeSection, drafters: Mapping[str, ResolvedDrafter]
) -> str | None:
    stages = {label for drafter in drafters.values() for label in drafter.stages}
    names = [name for name in section.drafters if name not in stages]
    asked = section.default
    if asked is None or asked in section.drafters:
        return asked
    origin = state.layered.origin("speculative.default")
    if asked != AUTO:
        raise ConfigError(
            f"speculative.default {asked!r} ({origin}) is no drafter of the config; {nearest(asked, [*drafters])}"
        )
    if len(names) > 1:
        raise ConfigError(
            f"speculative.default: which of {', '.join(names)} should requests get that name none? Write one, or null"
        )
    only = "the only drafter" if not stages else "the only drafter that is no stage of another"
    state.decide("speculative.default", names[0], only)
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
