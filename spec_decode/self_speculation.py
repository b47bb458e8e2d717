"""Self-speculation: the target guesses for itself with some of its own layers.

Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (arXiv 2404.16710),
section 4.3: the first layers draft, and the rest verifies with them. Xia et al. 2024, "SWIFT: On-the-Fly
Self-Speculative Decoding for LLM Inference Acceleration" (arXiv 2410.06916), section 4: layers in the middle are left
out of any model; whole layers here, where SWIFT leaves out attention and MLP one by one.

Drafting needs no weights and no pages of its own: the layers that run read the target's keys and values, and write
theirs to the slots of the drafted tokens, where verification overwrites them. Unlike in LayerSkip, verification
computes the first layers of the drafts anew, so that a draft costs its own layers in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from dovetail.contracts.draft_target import RunsTarget
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftSetup,
    SpeculationNeed,
)
from dovetail.spec_decode.chains import Chains


class SelfSpeculationOptions(PluginOptions):
    """Options of `self_speculation`: the layers that do not draft. One of the first two is given."""

    exit_layer: int | None = Field(default=None, ge=1)
    """The first so many layers draft: for models that were trained for it, as LayerSkip's."""
    skip_layers: tuple[int, ...] | None = None
    """Numbers of the layers that are left out, from 0 on: for any model, as SWIFT does. Which ones do least harm is to
    be found by measuring; the middle is a good start."""
    stop_below: float = Field(default=0.0, ge=0, lt=1)
    """A chain ends before the product of its highest probabilities (at temperature 1) falls below this; 0: every chain
    has the greatest length."""

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if (self.exit_layer is None) == (self.skip_layers is None):
            raise ValueError("give either exit_layer, the number of layers that draft, or skip_layers, those left out")
        if self.skip_layers is not None and not self.skip_layers:
            raise ValueError("skip_layers is empty: a draft would cost as much as the tokens that it guesses")
        return self

    def skipped(self, num_layers: int) -> frozenset[int]:
        """Returns the layers that are left out of a target with so many."""
        if self.exit_layer is not None:
            return frozenset(range(self.exit_layer, num_layers))
        return frozenset(self.skip_layers or ())


class SelfSpeculationDrafter(RunsTarget):
    """Drafts chains; those of sampled requests are drawn."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = SelfSpeculationOptions
    capabilities = DraftCapabilities(probabilities=True, confidence=True, stateless=True)
    options: SelfSpeculationOptions

    @classmethod
    def check(cls, need: SpeculationNeed, options: SelfSpeculationOptions, environment: Environment) -> list[str]:
        """Refuses layers that the target does not have."""
        layers = need.num_layers
        if options.exit_layer is not None and options.exit_layer >= layers:
            return [
                f"exit_layer is {options.exit_layer}, and the target has {layers} layers: a draft would cost as much "
                f"as the tokens that it guesses; set it below {layers}."
            ]
        if strange := sorted(layer for layer in options.skipped(layers) if not 0 <= layer < layers):
            named = ", ".join(map(str, strange))
            return [f"skip_layers names {named}, and the target has layers 0 to {layers - 1}: correct it."]
        if len(options.skipped(layers)) == layers:
            return [f"skip_layers names all {layers} layers: leave some to draft with."]
        return []

    def __init__(self, options: SelfSpeculationOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self._skipped = options.skipped(setup.num_layers)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafting = [index for index, request in enumerate(batch.requests) if request.max_drafts]
        requests = [batch.requests[index] for index in drafting]
        chains = Chains(requests, [request.max_drafts for request in requests])
        while len(chains.active):
            self._extend(chains)
        drafts: list[Draft | None] = [None] * len(batch.requests)
        for chain, index in enumerate(drafting):
            drafts[index] = chains.draft(chain)
        return drafts

    def _extend(self, chains: Chains) -> None:
        """One more token of each active chain."""
        assert self.setup.target is not None
        starts, ones = chains.last_positions, np.ones_like(chains.last_positions)
        hidden = self.setup.target.run(chains.active_seq_ids, starts, ones, chains.last_tokens, self._skipped)
        chains.extend(self.setup, self.setup.compute_logits(hidden), self.options.stop_below)
