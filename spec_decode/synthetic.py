"""Synthetic acceptance: accepts drafts with a given probability, whatever the tokens are. For measuring only.

What a step costs depends on how many drafts are accepted, hardly on which. With a rate that is given rather than
found, speed can be measured as a function of it, and a cost model (Leviathan et al. 2023, arXiv 2211.17192, section
3.3) be held against measurements. The options follow vLLM's `rejection_sample_method: synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    AcceptanceCapabilities,
    AcceptanceNeed,
    AcceptanceRule,
    Draft,
    Verdict,
    VerifyRequest,
)

Share = Annotated[float, Field(ge=0, le=1)]


class SyntheticOptions(PluginOptions):
    """Options of `synthetic`: exactly one of the three says how much is accepted."""

    rate: Share | None = None
    """Probability that a draft is accepted where all before it are: the alpha of Leviathan et al. Of k drafts,
    (1 - rate ** (k + 1)) / (1 - rate) tokens come per round on average, the bonus token included."""
    rates: tuple[Share, ...] | None = Field(default=None, min_length=1)
    """By position, the share of rounds in which at least so many drafts are accepted, as in vLLM's
    `synthetic_acceptance_rates`: [0.7, 0.5] accepts one draft or more in 70% of the rounds, two in 50%. At least as
    many as `num_tokens`."""
    length: float | None = Field(default=None, ge=1)
    """Mean tokens per round, the bonus token included, with as little variation as can be (vLLM's
    `synthetic_acceptance_length`): 2.6 accepts one draft in each round, and a second one in 60% of them. At most
    `num_tokens` + 1."""

    @model_validator(mode="after")
    def _one_of_them(self) -> SyntheticOptions:
        given = [name for name in ("rate", "rates", "length") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of rate, rates and length, not {' and '.join(given) or 'none'}")
        shares = self.rates or ()
        if any(later > before for before, later in pairwise(shares)):
            raise ValueError(f"rates must not rise: a draft is accepted only after those before it, got {shares}")
        return self


class SyntheticRule(AcceptanceRule):
    """Accepts drafts of a chain with given probabilities, and of a tree the chain of first children; the token after
    them is the target's. A request's uniforms decide, so that its seed gives the same verdicts in any batch.

    Requests with structured outputs get none of their drafts accepted: a form must not be broken.
    """

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = SyntheticOptions
    preference: ClassVar[int] = -20
    options: SyntheticOptions
    capabilities = AcceptanceCapabilities(trees=True, sampling=True, synthetic=True)

    @classmethod
    def check(cls, need: AcceptanceNeed, options: SyntheticOptions, environment: Environment) -> list[str]:
        """Refuses rates for other numbers of drafts than the config has."""
        if options.rates is not None and len(options.rates) < need.num_tokens:
            return [f"rates has {len(options.rates)} values, and num_tokens is {need.num_tokens}: give one for each."]
        if options.length is not None and options.length > need.num_tokens + 1:
            return [f"length is {options.length:g}, and {need.num_tokens} drafts bring {need.num_tokens + 1} at most."]
        return []

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return [self._judge(request) for request in requests]

    def _judge(self, request: VerifyRequest) -> Verdict:
        path: list[int] = []
        children = _first_children(request.draft)
        if request.sampling.structured_outputs is None:
            node = children.get(-1)
            while node is not None and request.accept_uniforms[node] < self.chance(len(path)):
                path.append(node)
                node = children.get(node)
        return Verdict(path, request.target.tokens()[path[-1] + 1 if path else 0])

    def chance(self, depth: int) -> float:
        """Probability that the draft behind `depth` accepted ones is accepted."""
        options = self.options
        if options.rate is not None:
            return options.rate
        if options.length is not None:
            return min(1.0, max(0.0, options.length - 1 - depth))
        shares = (1.0, *(options.rates or ()), 0.0)
        depth = min(depth, len(shares) - 2)
        return shares[depth + 1] / shares[depth] if shares[depth] else 0.0


def _first_children(draft: Draft) -> dict[int, int]:
    """The first child of each node that has one; -1 means the root."""
    first: dict[int, int] = {}
    for node, parent in enumerate(draft.parent_indices):
        first.setdefault(parent, node)
    return first
