"""Rules about speculation: which drafters, which one by default, and the rule that says which drafts stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.config.choose import Chosen, choose
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import ResolvedDrafter, ResolvedSpeculation
from dovetail.config.rules_draft import (
    DraftModelScope,
    choose_draft_attention,
    choose_draft_quantization,
    draft_caches,
    hidden_layers,
    refuse_attention,
)
from dovetail.config.schema import AUTO, OFF, DrafterSection, SpeculativeSection
from dovetail.config.slots import ACCEPTANCE, DRAFTER
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.model import ModelFamily, ModelSize
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import AcceptanceNeed, DraftWorker, SpeculationNeed
from dovetail.contracts.weights import ModelFiles, WeightFormat

_MIN_CONFIDENCE = 0.4


@dataclass(frozen=True)
class Target:
    """What rules about speculation know of the model that is sped up."""

    files: ModelFiles
    weight_format: WeightFormat
    size: ModelSize
    dtype: str
    kv_dtype: str
    family: type[ModelFamily]


def choose_speculation(state: Resolution, target: Target) -> tuple[ResolvedSpeculation | None, bool]:
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
        gives_hidden_layers=target.family.capabilities.hidden_layers,
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
    state: Resolution, section: SpeculativeSection, name: str, need: SpeculationNeed, target: Target
) -> tuple[Chosen[DraftWorker], ResolvedDrafter]:
    if name == OFF:
        raise ConfigError(
            f"speculative.drafters.{name}: requests say {OFF!r} to go without a drafter; name it otherwise"
        )
    drafter = section.drafters[name]
    path = ("speculative", "drafters", name)
    scope = DraftModelScope(state, path, (target.files, target.weight_format, target.size.vocab_size))

    def own_need() -> SpeculationNeed:
        """What is asked of this drafter, once its model is known."""
        dtype = target.dtype if scope.info is None else scope.info.dtype
        kv_dtype = dtype if state.config.cache.dtype == AUTO else target.kv_dtype
        return replace(need, num_tokens=drafter.num_tokens, kv_dtype=kv_dtype, model=scope.info)

    def against(plugin: type[DraftWorker], options: PluginOptions) -> Sequence[str]:
        asked = plugin.model_section(options)
        if asked is not None:
            scope.resolve(asked)
        can, reasons = plugin.capabilities, []
        if drafter.length == "confidence" and not (can.confidence or can.probabilities):
            reasons.append("it says nothing of its confidence, so length must be adaptive or fixed")
        return [*reasons, *reasons_against(plugin, own_need(), options, state.environment)]

    chosen = choose(state, DRAFTER.at(name), need, ask=against)
    scope.apply()
    refuse_attention(state, path, chosen)
    final = own_need()
    specs = draft_caches(chosen, final)
    dtype = target.dtype if scope.info is None else scope.info.dtype
    trees = _is_tree_drafter(chosen)
    attention = choose_draft_attention(state, path, specs, dtype, trees=trees) if specs else None
    return chosen, ResolvedDrafter(
        name,
        chosen.component,
        drafter.num_tokens,
        drafter.length,
        _min_confidence(state, name, drafter),
        attention=attention,
        kv_dtype=final.kv_dtype,
        model=scope.model,
        quantization=choose_draft_quantization(state, path, chosen, dtype),
        hidden_layers=hidden_layers(chosen, final),
        reads_next_token=chosen.plugin.capabilities.reads_next_token,
        bytes_per_token=sum(spec.page_bytes(1) for spec in specs),
    )


def _min_confidence(state: Resolution, name: str, drafter: DrafterSection) -> float:
    key = f"speculative.drafters.{name}.min_confidence"
    asked = drafter.min_confidence
    if drafter.length != "confidence":
        if asked is not None:
            raise ConfigError(
                f"{key} {asked} ({state.layered.origin(key)}) has no meaning with length {drafter.length!r}: set "
                "length: confidence, or remove it"
            )
        return 0.0
    if asked is None:
        state.decide(key, _MIN_CONFIDENCE, "the default with length: confidence")
    return _MIN_CONFIDENCE if asked is None else asked


def _is_tree_drafter(drafter: Chosen[DraftWorker]) -> bool:
    return drafter.plugin.capabilities.trees and drafter.plugin.proposes_trees(drafter.options)


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
