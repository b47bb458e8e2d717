"""Block verification: judges a drawn chain as a whole, keeps the target's distribution, and accepts at least as much as
token-by-token rejection.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2. In the paper's
letters, X_1 .. X_gamma are the draft tokens, M_s the draft's distributions, M_b the target's, and

    p_0 = 1,  p_i = min(1, p_{i-1} M_b(X_i | X^{i-1}) / M_s(X_i | X^{i-1}))
    S_i = sum_x max(0, p_i M_b(x | X^i) - M_s(x | X^i))
    h_i = S_i / (S_i + 1 - p_i) for i < gamma,  h_gamma = p_gamma

X^tau is accepted, where tau is the largest i whose own draw succeeds with probability h_i, and 0 where none does. The
token after it comes from max(0, p_tau M_b - M_s), scaled to 1, or from M_b where tau = gamma. A token that the target
overrates thus makes up for one before it that it underrates: rejection forgets such a surplus, since min(1, p / q) is
taken token by token. Whatever the draft, a prefix X^i is accepted with probability p_i (the paper's Lemma 4), which is
at least the product that rejection accepts it with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dovetail.contracts.speculation import (
    AcceptanceCapabilities,
    AcceptanceRule,
    Verdict,
    VerifyRequest,
    targets_of,
)
from dovetail.nn.host_copies import on_device
from dovetail.spec_decode.rejection import draw, is_drawn, matching_path, residual


class BlockRule(AcceptanceRule):
    """Outputs follow the target's distribution; greedy requests get its tokens exactly.

    Where a draft was not drawn no prefix has a surplus, and block verification accepts what rejection accepts. So it
    judges such drafts in the same way, and a seeded request keeps its tokens with and without drafts. It judges chains
    only: the paper has no trees.
    """

    contract: ClassVar[tuple[int, int]] = (1, 1)
    preference: ClassVar[int] = 0
    capabilities = AcceptanceCapabilities(lossless=True, sampling=True)

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        drawn = [request for request in requests if is_drawn(request)]
        judged = iter(_judge(drawn))
        return [
            next(judged) if is_drawn(request) else matching_path(request.draft, request.target.tokens())
            for request in requests
        ]


def _judge(requests: Sequence[VerifyRequest]) -> list[Verdict]:
    """Verdicts of drawn chains. The host waits three times for all of them together."""
    if not requests:
        return []
    sizes = [len(request.draft.token_ids) for request in requests]
    targets = torch.split(targets_of(requests), [size + 1 for size in sizes])
    drafts = [request.draft.probs for request in requests if request.draft.probs is not None]
    tokens = [np.asarray(request.draft.token_ids, dtype=np.int64) for request in requests]
    surplus, chances = acceptance_chances(targets, drafts, tokens)
    verdicts: list[tuple[int, Tensor, float]] = []
    for i, request in enumerate(requests):
        succeeded = np.flatnonzero(request.accept_uniforms < chances[i][1:])
        last = int(succeeded[-1]) + 1 if len(succeeded) else 0
        rest = targets[i][last]
        if last < sizes[i]:
            rest = residual(rest * float(surplus[i][last]), drafts[i][last])
        verdicts.append((last, rest, float(request.recover_uniforms[last])))
    uniforms = np.array([uniform for _, _, uniform in verdicts])
    following: list[int] = draw(torch.stack([rest for _, rest, _ in verdicts]), uniforms).tolist()
    return [Verdict(list(range(last)), token) for (last, _, _), token in zip(verdicts, following, strict=True)]


def acceptance_chances(
    targets: Sequence[Tensor], drafts: Sequence[Tensor], tokens: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns p_i and h_i of each chain, float64 [k + 1] each, from i = 0 on (h_0 is 1).

    Args:
        targets: float32 [k + 1, vocab_size] of each chain, the target's distributions.
        drafts: float32 [k, vocab_size] of each, those that its tokens were drawn from.
        tokens: int64 [k] of each.
    """
    device = targets[0].device
    before, drawn_from = torch.cat([target[:-1] for target in targets]), torch.cat(list(drafts))
    columns = on_device(np.concatenate(tokens), device)[:, None]
    chosen = torch.stack((before.gather(1, columns), drawn_from.gather(1, columns))).double()[..., 0]
    ends = np.cumsum([len(ids) for ids in tokens])
    ratios = np.split((chosen[0] / chosen[1]).cpu().numpy(), ends[:-1])
    surplus = [_surplus(each) for each in ratios]
    # Of i < gamma alone: what follows the last token was not drafted. Chain by chain: how a device adds rows up may
    # depend on how many they are.
    scales = torch.split(on_device(np.concatenate([p[:-1] for p in surplus]), device).float(), list(map(len, tokens)))
    sums = [
        (target[:-1] * scale[:, None] - draft).clamp_(min=0).sum(-1)
        for target, draft, scale in zip(targets, drafts, scales, strict=True)
    ]
    found = np.split(torch.cat(sums).double().cpu().numpy(), ends[:-1])
    return surplus, [_chances(p, s) for p, s in zip(surplus, found, strict=True)]


def _surplus(ratios: np.ndarray) -> np.ndarray:
    """p_0 .. p_gamma, float64 [k + 1], of each token's M_b / M_s, float64 [k]."""
    p = np.ones(len(ratios) + 1)
    for i, ratio in enumerate(ratios):
        p[i + 1] = min(1.0, p[i] * ratio)
    return p


def _chances(p: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """h_0 .. h_gamma, float64 [k + 1], of p_0 .. p_gamma, [k + 1], and S_0 .. S_{gamma-1}, [k]."""
    within, rest = sums[1:], 1 - p[1:-1]
    # 0 / 0: every draft after this one is accepted, so whether this one's own draw succeeds decides nothing.
    middle = np.divide(within, within + rest, out=np.zeros_like(within), where=within > 0)
    return np.concatenate(([1.0], middle, p[-1:]))
