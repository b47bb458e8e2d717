"""The rules about pipeline stages: which layers each of them has, and what cannot run over several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.config.resolved import ResolvedDrafter
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution


def choose_stage_layers(state: Resolution, model: ChosenModel) -> tuple[int, ...]:
    """How many decoder layers each stage has; empty for one stage. Raises `ConfigError`."""
    section = state.config.executor
    num_stages, num_layers = section.pipeline_parallel, model.size.num_layers
    if num_stages == 1:
        if section.stage_layers is not None and section.stage_layers != [num_layers]:
            raise _refused(
                state,
                f"executor.pipeline_parallel is 1: one stage has all {num_layers} layers; leave this out",
            )
        return ()
    if num_stages > num_layers:
        origin = state.layered.origin("executor.pipeline_parallel")
        raise ConfigError(
            f"executor.pipeline_parallel {num_stages} ({origin}): the model has {num_layers} layers, and each stage"
            f" needs one at least; set it to {num_layers} or less"
        )
    if section.stage_layers is not None:
        return _given(state, section.stage_layers, num_stages, num_layers)
    return _balanced(state, model, num_stages)


def refuse_over_stages(stage_layers: Sequence[int], drafters: Mapping[str, ResolvedDrafter]) -> None:
    """Raises `ConfigError` for drafters that need what the last stage does not have."""
    if not stage_layers:
        return
    for name, drafter in drafters.items():
        why = _against_stages(drafter)
        if why is not None:
            raise ConfigError(
                f"speculative.drafters.{name} ({drafter.component.name}): {why}; set executor.pipeline_parallel to 1,"
                " or choose another drafter"
            )


def _against_stages(drafter: ResolvedDrafter) -> str | None:
    if drafter.trees:
        # A tree's accepted path is moved to the slots behind the known tokens. Other stages hear of it with a later
        # step, and a step of another request may read these pages before.
        return "it proposes trees, and drafts that several pipeline stages verify are chains"
    if drafter.runs_target:
        return "it runs the target's layers, which pipeline stages share, and drafters run on the last stage"
    if drafter.abilities.tensor_parallel == 1:
        return "it drafts for targets on one rank only (DraftCapabilities.tensor_parallel), and stages are several"
    return None


def _given(state: Resolution, layers: Sequence[int], num_stages: int, num_layers: int) -> tuple[int, ...]:
    advice = f"; give {num_stages} counts that sum up to {num_layers}, or leave it out"
    if len(layers) != num_stages:
        raise _refused(state, f"it names {len(layers)} stages, and executor.pipeline_parallel is {num_stages}{advice}")
    if min(layers) < 1:
        raise _refused(state, f"each stage needs one layer at least{advice}")
    if sum(layers) != num_layers:
        raise _refused(state, f"these are {sum(layers)} layers, and the model has {num_layers}{advice}")
    return tuple(layers)


def _balanced(state: Resolution, model: ChosenModel, num_stages: int) -> tuple[int, ...]:
    from dovetail.nn.stage_split import cut, stage_costs  # needs torch, which most commands do without

    family = model.family.plugin(model.family.options)
    with model.family.calling("create"):
        try:
            costs = stage_costs(family.create, model.hf_config, model.size.num_layers)
        except ModelError as error:
            raise ConfigError(f"executor.pipeline_parallel {num_stages}: {error}") from None
    layers = cut(costs, num_stages)
    share = costs.output / max(1, sum(costs.layers) / len(costs.layers))
    reason = f"stages of equal cost, as far as whole layers allow; the output layer costs as much as {share:.1f} layers"
    state.decide("executor.stage_layers", list(layers), reason)
    return layers


def _refused(state: Resolution, why: str) -> ConfigError:
    asked = state.config.executor.stage_layers
    return ConfigError(f"executor.stage_layers {asked} ({state.layered.origin('executor.stage_layers')}): {why}")
