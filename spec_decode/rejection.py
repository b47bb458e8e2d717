"""Rejection sampling: accepts draft tokens with a probability that keeps the target's distribution exactly.

For chains this is Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192), for trees the multi-step speculative
sampling of Miao et al. 2024 (SpecInfer, arXiv 2305.09781, Algorithm 2), of which the chain is the case of one child.

Siblings may be drawn from one distribution with replacement, as SpecInfer has it, or without, as recursive rejection
sampling has it (Yang et al. 2024, arXiv 2401.06706; Jeon et al. 2024, arXiv 2402.14160), which tries no token twice and
accepts more. The rule is the same: a draft's distribution is the one that it was drawn from, given its elder siblings,
so without replacement these have no mass in it and the rest is scaled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dovetail.contracts.operators import AcceptsChains, Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import (
    AcceptanceCapabilities,
    AcceptanceRule,
    Draft,
    Verdict,
    VerifyRequest,
    targets_of,
)
from dovetail.nn.host_copies import on_device


class RejectionRule(AcceptanceRule):
    """Outputs follow the target's distribution; greedy requests get its tokens exactly.

    Drafts without probabilities were not drawn; their token x is accepted with the target's own p(x). For them the rule
    first draws the target's token, as without drafts, and accepts the draft token that equals it: this has the same
    probability, and a seeded request keeps its tokens with and without drafts.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    preference: ClassVar[int] = 10
    capabilities = AcceptanceCapabilities(lossless=True, trees=True, sampling=True)

    def __init__(self, options: PluginOptions):
        super().__init__(options)
        self._operators: AcceptsChains | None = None

    def use_operators(self, operators: Operators) -> None:
        """Keeps a set that `AcceptsChains` for the drawn chains of a step, all at once."""
        self._operators = operators if isinstance(operators, AcceptsChains) else None

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        # Drafts that were chosen rather than drawn, and a target whose tokens are certain, need no distributions.
        drawn = [i for i, request in enumerate(requests) if is_drawn(request)]
        verdicts = dict(zip(drawn, self._judge_drawn([requests[i] for i in drawn]), strict=True))
        return [
            verdicts[i] if i in verdicts else matching_path(request.draft, request.target.tokens())
            for i, request in enumerate(requests)
        ]

    def _judge_drawn(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """Returns verdicts of drafts that were drawn: operators verify chains where they can, this rule the rest."""
        judged: dict[int, Verdict] = {}
        if self._operators is not None:
            chains = [i for i, request in enumerate(requests) if not request.draft.is_tree]
            judged = dict(zip(chains, accept_chains([requests[i] for i in chains], self._operators), strict=True))
        rest = [i for i in range(len(requests)) if i not in judged]
        if rest:
            walked = [requests[i] for i in rest]
            targets = torch.split(targets_of(walked), [len(request.draft.token_ids) + 1 for request in walked])
            judged |= {i: self._sample_tree(requests[i], target) for i, target in zip(rest, targets, strict=True)}
        return [judged[i] for i in range(len(requests))]

    def accepts(self, p: float, q: float, uniform: float) -> bool:
        """Whether a draft token is accepted that has probability `p` in the rest of the target's distribution and `q`
        in the one that it was drawn from: with probability min(1, p / q). Not called for chains that operators
        verify."""
        return uniform * q < p

    def _sample_tree(self, request: VerifyRequest, target: Tensor) -> Verdict:
        """Multi-step speculative sampling; `target` is the request's. Siblings are tried in order; each that is refused
        leaves the target's distribution p with what the draft's distribution q has not covered."""
        draft, probs = request.draft, request.draft.probs
        assert probs is not None
        children = _children(draft)
        path: list[int] = []
        p = target[0]
        while True:
            accepted = None
            for node in children[path[-1] + 1 if path else 0]:
                token, q = draft.token_ids[node], probs[node]
                if self.accepts(float(p[token]), float(q[token]), float(request.accept_uniforms[node])):
                    accepted = node
                    break
                p = residual(p, q)
            if accepted is None:
                return Verdict(path, int(draw(p[None], request.recover_uniforms[len(path)].reshape(1))))
            path.append(accepted)
            p = target[accepted + 1]


def is_drawn(request: VerifyRequest) -> bool:
    """Whether the request's draft was drawn, and its tokens will be."""
    return request.draft.probs is not None and not request.sampling.is_greedy


def accept_chains(requests: Sequence[VerifyRequest], operators: AcceptsChains) -> list[Verdict]:
    """Returns verdicts of drawn chains, with one transfer to the host for all of them."""
    if not requests:
        return []
    probs = [request.draft.probs for request in requests if request.draft.probs is not None]
    draft = torch.cat(probs)
    starts = np.cumsum([0, *(len(rows) for rows in probs)], dtype=np.int32)

    def together(parts: Sequence[object], dtype: type[np.generic]) -> Tensor:
        return on_device(np.concatenate([np.asarray(part, dtype) for part in parts]), draft.device)

    accepted, tokens = operators.accept_chains(
        targets_of(requests),
        draft,
        together([request.draft.token_ids for request in requests], np.int64),
        on_device(starts, draft.device),
        together([request.accept_uniforms for request in requests], np.float64),
        together([request.recover_uniforms for request in requests], np.float64),
    )
    counts, following = torch.stack((accepted, tokens)).tolist()
    return [Verdict(list(range(count)), token) for count, token in zip(counts, following, strict=True)]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Returns norm(max(p - q, 0)), the part of p that q does not cover. Both float32 [vocab_size]; the mass of p may be
    below 1."""
    rest = (p - q).clamp_(min=0)
    mass = rest.sum()
    # Nothing is left only if p and q are equal but for rounding, when a refusal is a rounding error as well.
    return torch.where(mass > 0, rest / mass, p)


def draw(probs: Tensor, uniforms: object) -> Tensor:
    """Draws one token per row by inverting the cumulative distribution, never one of probability 0.

    Args:
        probs: float32 [n, vocab_size].
        uniforms: array of float64 [n] in [0, 1).

    Returns:
        int64 [n].
    """
    cumulative = probs.double().cumsum(-1)
    target = torch.as_tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.shape[1] - 1)
    # Serial sums never stop at a probability of 0; parallel ones, as on GPUs, are not quite monotonic.
    return torch.where(probs.gather(1, token) > 0, token, probs.max(-1, keepdim=True).indices)[:, 0]


def matching_path(draft: Draft, tokens: Sequence[int]) -> Verdict:
    """Returns the path of draft tokens that equal the target's own tokens ([k + 1], one per row), and the token after
    it. Parents precede children, so one pass suffices."""
    path: list[int] = []
    last = -1
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parent_indices, strict=True)):
        if parent == last and token == tokens[last + 1]:
            path.append(node)
            last = node
    return Verdict(path, tokens[last + 1])


def _children(draft: Draft) -> list[list[int]]:
    """Children of each row's node, in order."""
    children: list[list[int]] = [[] for _ in range(len(draft.token_ids) + 1)]
    for node, parent in enumerate(draft.parent_indices):
        children[parent + 1].append(node)
    return children
