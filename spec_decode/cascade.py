"""A cascade: asks other drafters in turn, and takes the first guess that is long enough.

A lookup costs next to nothing and is right where a text repeats itself; a head or a draft model costs a pass and is
right more often elsewhere. So the cheap one answers where it has found something, and the next one is asked for the
other requests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from dovetail.contracts.draft_stages import ComposesDrafters, DraftStage
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftSetup,
    SpeculationNeed,
)


class CascadeOptions(PluginOptions):
    """Options of `cascade`: whom it asks, and what is a guess."""

    stages: Annotated[list[str], Field(min_length=2)]
    """Labels of other drafters of the config, in the order in which they are asked. One that draws its drafts must be
    the last."""
    min_tokens: int = Field(default=1, ge=1)
    """Fewest tokens of a guess that keeps the next stage from being asked; where fewer are wanted, as many as these.
    The last stage's guess is taken as it is."""


class CascadeDrafter(ComposesDrafters):
    """Which stage answers follows from the known tokens of the request alone, never from what was drawn, so drafts keep
    the target's distribution as those of each stage do."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = CascadeOptions
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)
    options: CascadeOptions

    @classmethod
    def stages(cls, options: PluginOptions) -> Sequence[str]:
        """As the option says."""
        assert isinstance(options, CascadeOptions)
        return options.stages

    @classmethod
    def check(cls, need: SpeculationNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses stages after one that draws."""
        *first, _ = need.stages.items()
        return [
            f"its stage {label!r} draws its drafts, and a stage after it would be asked because of what was drawn,"
            " which changes the distribution of the output: name it last"
            for label, stage in first
            if stage.capabilities.probabilities
        ]

    def __init__(self, options: CascadeOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self._stages = list(setup.stages.values())
        self._answered: dict[int, DraftStage] = {}
        """By seq_id, whose draft was the last."""

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts: list[Draft | None] = [None] * len(batch.requests)
        wanted = [request.max_drafts for request in batch.requests]
        for stage in self._stages:
            if not any(wanted):
                break
            for i, draft in enumerate(stage.propose(wanted)):
                size = 0 if draft is None or not wanted[i] else len(draft.token_ids)
                if size and (stage is self._stages[-1] or size >= min(self.options.min_tokens, wanted[i])):
                    drafts[i], wanted[i] = draft, 0
                    self._answered[batch.requests[i].seq_id] = stage
        return drafts

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        self._answered[seq_id].on_verified(seq_id, accepted, num_drafted)

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._answered.pop(seq_id, None)
