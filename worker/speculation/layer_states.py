"""States between the target's layers that drafters read: which of them a pipeline stage computes, and how many it gets
from the stages before it."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.resolved import ResolvedSpeculation
from dovetail.contracts.executor import ANSWERING_TENSOR_RANK
from dovetail.nn.context import BuildContext


@dataclass(frozen=True)
class LayerStates:
    """Of one rank. They go from stage to stage with the residual stream, to the rank that drafts."""

    num_earlier: int = 0
    """How many come from the stages before."""
    own: tuple[int, ...] = ()
    """Ascending numbers of the layers whose input states this rank adds."""


def layer_states(section: ResolvedSpeculation, context: BuildContext) -> LayerStates:
    """What the rank of this context has to do with them: ranks of one stage compute the same states, and each sends to
    its own rank of the next stage, so only those that lead to the rank that drafts do anything."""
    if context.tp_rank != ANSWERING_TENSOR_RANK:
        return LayerStates()
    wanted = sorted({layer for drafter in section.drafters.values() for layer in drafter.hidden_layers})
    held = context.layers
    if held is None:
        return LayerStates(own=tuple(wanted))
    # The state behind the last layer, before the norm, is the last stage's.
    own = [layer for layer in wanted if layer >= held.start and (layer < held.stop or context.is_last_stage)]
    return LayerStates(sum(layer < held.start for layer in wanted), tuple(own))
