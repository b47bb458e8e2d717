"""Chains of draft tokens that grow token by token, for all requests of a round together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dovetail.contracts.speculation import Draft, DraftRequest, DraftSetup
from dovetail.nn.host_copies import on_device
from dovetail.nn.row_max import row_max


class Chains:
    """The chains of one round: row i is that of the i-th request that drafts."""

    def __init__(self, requests: Sequence[DraftRequest], limits: Sequence[int]):
        self._requests = requests
        self._limits = np.array(limits)
        self._num_known = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
        self._tokens = np.zeros((len(requests), 1 + max(limits, default=0)), dtype=np.int64)
        """[requests, 1 + longest chain]: the last known token, and the chain behind it."""
        self._tokens[:, 0] = [request.token_ids[-1] for request in requests]
        self.lengths = np.zeros(len(requests), dtype=np.int64)
        """[requests]: draft tokens so far."""
        self._sureness = np.ones(len(requests))
        self._probs: list[list[torch.Tensor]] = [[] for _ in requests]
        self._confidence: list[list[float]] = [[] for _ in requests]
        """Of chains that are not drawn, where the host wants to know."""
        self.active = np.arange(len(requests))
        """int64 [active chains]: the rows of chains that go on."""

    @property
    def active_requests(self) -> list[DraftRequest]:
        """The requests of the active chains."""
        return [self._requests[i] for i in self.active.tolist()]

    @property
    def active_seq_ids(self) -> list[int]:
        """Whose the active chains are."""
        return [request.seq_id for request in self.active_requests]

    @property
    def last_tokens(self) -> np.ndarray:
        """int64 [active chains]: the newest token of each; of an empty one, the last known token."""
        tokens: np.ndarray = self._tokens[self.active, self.lengths[self.active]]
        return tokens

    @property
    def last_positions(self) -> np.ndarray:
        """int64 [active chains]: where `last_tokens` are in their requests."""
        positions: np.ndarray = self._num_known[self.active] - 1 + self.lengths[self.active]
        return positions

    def draft(self, index: int) -> Draft | None:
        """Returns the draft of one finished chain."""
        if self.lengths[index] == 0:
            return None
        token_ids: list[int] = self._tokens[index, 1 : 1 + self.lengths[index]].tolist()
        probs = torch.stack(self._probs[index]) if self._probs[index] else None
        return Draft(token_ids, probs=probs, confidence=self._confidence[index] or None)

    def extend(
        self,
        setup: DraftSetup,
        logits: torch.Tensor,
        stop_below: float,
        target_ids: torch.Tensor | None = None,
    ) -> np.ndarray:
        """Adds a token to each active chain that is confident enough. This is decided before the token is drawn: a
        chain's length must not depend on its last token.

        A chain is confident enough while the product of its steps' highest probabilities, at temperature 1, is at least
        `stop_below`. Greedy requests get the most likely token, others a draw.

        Args:
            logits: [active chains, tokens]
            target_ids: int64 [tokens], the target's id of each column; None: the columns are those ids.

        Returns:
            int64 [chains that go on]: the rows of `logits` that belong to them.
        """
        rows = np.arange(len(self.active))
        highest = np.ones(len(self.active))
        if stop_below > 0 or setup.wants_confidence:
            highest = (logits.amax(-1).float() - logits.float().logsumexp(-1)).exp().cpu().numpy()
        if stop_below > 0:
            self._sureness[self.active] *= highest
            rows = np.flatnonzero(self._sureness[self.active] >= stop_below)
            self.active = self.active[rows]
            logits = logits if len(rows) == len(logits) else logits[on_device(rows, logits.device)]
        if not len(rows):
            return rows
        tokens, probs = self._choose(setup, logits, target_ids)
        self.lengths[self.active] += 1
        self._tokens[self.active, self.lengths[self.active]] = tokens
        for chain, row in probs.items():
            self._probs[self.active[chain]].append(row)
        if setup.wants_confidence:
            for chain, (index, own) in enumerate(zip(self.active.tolist(), highest[rows].tolist(), strict=True)):
                if chain not in probs:
                    self._confidence[index].append(min(own, 1.0))
        goes_on = self.lengths[self.active] < self._limits[self.active]
        self.active = self.active[goes_on]
        return rows[goes_on]

    def _choose(
        self, setup: DraftSetup, logits: torch.Tensor, target_ids: torch.Tensor | None
    ) -> tuple[np.ndarray, Mapping[int, torch.Tensor]]:
        """Returns the token of each active chain, and, by index among these, the distributions that were drawn from."""
        requests = self.active_requests
        drawn = [chain for chain, request in enumerate(requests) if not request.sampling.is_greedy]
        tokens = row_max(logits)[1]
        probs = torch.empty(0)
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            wanted = logits if len(drawn) == len(logits) else logits[index]
            probs = setup.distributions(wanted, [requests[chain].sampling for chain in drawn])
            depths = self.lengths[self.active]
            tokens[index] = setup.draw(probs, np.array([requests[i].uniforms[depths[i]] for i in drawn]))
        if target_ids is not None:
            tokens = target_ids[tokens]
            whole = torch.zeros(len(drawn), setup.vocab_size, device=logits.device)
            probs = whole.index_copy_(1, target_ids, probs) if drawn else probs
        return tokens.cpu().numpy(), dict(zip(drawn, probs, strict=True))
