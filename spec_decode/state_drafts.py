"""Drafters that guess from the target's own states, through a small head that runs over pages of its own.

What EAGLE heads and modules for multi-token prediction have in common: slot t holds the pair of the token at position t
+ 1 and the target's state at t. So the drafter can run over a step of the target at once, and the target's states
replace the guessed ones of the round before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftRequest,
    KeepsLayers,
    TreesByOption,
)
from dovetail.nn.host_copies import on_device
from dovetail.spec_decode.chains import Chains
from dovetail.spec_decode.growing_tree import GrowingTree

_TREE_DEPTH = 4


class StateDraftOptions(PluginOptions):
    """The shape of drafts."""

    top_k: int = Field(default=1, ge=1)
    """1: chains. k > 1: trees, in which the k best nodes of each depth get k children each, and of which the
    `num_tokens` best nodes are proposed; they are not drawn, whatever the temperature."""
    depth: int | None = Field(default=None, ge=1)
    """Deepest nodes of a tree, 4 where it is left out; chains go as deep as num_tokens."""
    stop_below: float = Field(default=0.0, ge=0, lt=1)
    """A chain ends before the product of the head's highest probabilities (at temperature 1) falls below this; 0: every
    chain has the greatest length."""

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.top_k > 1 and self.stop_below > 0:
            raise ValueError(
                "stop_below ends chains; trees (top_k above 1) follow the head's confidence anyway: leave it out, or "
                "set top_k to 1"
            )
        if self.top_k == 1 and self.depth is not None:
            raise ValueError(
                "depth is about trees, and top_k 1 asks for chains, which go as deep as num_tokens: leave it out, or "
                "set top_k to 2 or more"
            )
        return self


class StateDrafter(KeepsLayers, TreesByOption):
    """Drafts chains or trees with `run` and `logits`. Keeps no state: all that it knows of a request is in its KV
    pages."""

    # The head's weights are its own, on the rank that drafts.
    capabilities: ClassVar[DraftCapabilities] = DraftCapabilities(
        tensor_parallel=None,
        trees=True,
        probabilities=True,
        needs_hidden_states=True,
        confidence=True,
        reads_next_token=True,
    )
    options: StateDraftOptions
    target_ids: torch.Tensor | None = None
    """int64: the target's id of each column of `logits`; None: the same ids."""

    @classmethod
    def proposes_trees(cls, options: Any) -> bool:
        """Whether the option `top_k` asks for trees."""
        assert isinstance(options, StateDraftOptions)
        return options.top_k > 1

    @abstractmethod
    def states(self, batch: DraftBatch) -> torch.Tensor:
        """Returns the target's states that the head reads, [N, ...]."""

    @abstractmethod
    def first_features(self, states: torch.Tensor) -> torch.Tensor:
        """Returns features [N, hidden_size] of rows of `states`."""

    @abstractmethod
    def run(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the head over tokens at positions + 1 (int64 [T]), each with the feature at `positions` (int64 [T]).
        Returns the features behind them and the same ready for `logits`, both [T, hidden_size]."""

    @abstractmethod
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns logits after `outputs`: [N, hidden_size] -> [N, tokens]."""

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        features, outputs, drafting = self._take_in(batch)
        drafts: list[Draft | None] = [None] * len(batch.requests)
        if not drafting:
            return drafts
        requests = [batch.requests[i] for i in drafting]
        grow = self._trees if self.options.top_k > 1 else self._chains
        found = grow(requests, features, outputs)
        for place, draft in zip(drafting, found, strict=True):
            drafts[place] = draft
        return drafts

    def _take_in(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Runs the head over the tokens that the target computed. Returns the features and outputs after the last known
        token of the requests that draft, and which these are."""
        states = self.states(batch)
        seq_ids: list[int] = []
        starts: list[int] = []
        tokens: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        last: list[int] = []
        drafting: list[int] = []
        num_rows = 0
        for i, request in enumerate(batch.requests):
            start = request.first_position
            following = request.token_ids[start + 1 : start + 1 + len(request.hidden_rows)]
            if not len(following):
                continue
            seq_ids.append(request.seq_id)
            starts.append(start)
            tokens.append(following)
            rows.append(request.hidden_rows[: len(following)])
            num_rows += len(following)
            if request.max_drafts > 0:
                last.append(num_rows - 1)
                drafting.append(i)
        if not seq_ids:
            return states[:0], states[:0], []
        counts = np.array([len(part) for part in tokens])
        slots = self.setup.pages.plan(seq_ids, np.array(starts), counts)
        taken = self.first_features(states[self._to_device(np.concatenate(rows))])
        features, outputs = self._run(np.concatenate(tokens), taken, slots)
        wanted = torch.tensor(last, dtype=torch.int64, device=self.setup.device)
        return features[wanted], outputs[wanted], drafting

    def _chains(
        self, requests: Sequence[DraftRequest], features: torch.Tensor, outputs: torch.Tensor
    ) -> list[Draft | None]:
        """Drafts chains token by token. The first token is known already: `outputs` follow the last known token."""
        chains = Chains(requests, [request.max_drafts for request in requests])
        while True:
            logits = self.logits(outputs)
            rows = chains.extend(self.setup, logits, self.options.stop_below, self.target_ids)
            if not len(rows):
                return [chains.draft(i) for i in range(len(requests))]
            slots = chains.last_positions - 1
            self.setup.pages.plan(chains.active_seq_ids, slots, np.ones_like(slots))
            features, outputs = self._run(chains.last_tokens, features[self._to_device(rows)], slots)

    def _trees(
        self, requests: Sequence[DraftRequest], features: torch.Tensor, outputs: torch.Tensor
    ) -> list[Draft | None]:
        """Drafts trees depth by depth. A query token sees all slots before the query, so the inner nodes of all depths
        so far are run again with each new depth."""
        trees = [GrowingTree(request.max_drafts - 1) for request in requests]
        # The features that each tree's inner nodes come with: those behind their parents.
        inputs = [features[:0] for _ in requests]
        self._branch([(tree, -1) for tree in trees], outputs)
        results = [features[i : i + 1] for i in range(len(trees))]
        for _ in range((self.options.depth or _TREE_DEPTH) - 1):
            newest = [tree.choose_inner(self.options.top_k) for tree in trees]
            if not any(newest):
                break
            for i, (tree, nodes) in enumerate(zip(trees, newest, strict=True)):
                if nodes:
                    # Row 0 of `results` is behind the last known token, row p + 1 behind inner node p.
                    parents = torch.tensor(tree.inner_parents(), device=self.setup.device)[-len(nodes) :] + 1
                    inputs[i] = torch.cat((inputs[i], results[i][parents]))
            growing = [i for i, tree in enumerate(trees) if tree.inner]
            new_features, new_outputs = self._run_inner([(requests[i], trees[i], inputs[i]) for i in growing])
            end = 0
            rows: list[int] = []
            branches: list[tuple[GrowingTree, int]] = []
            for i in growing:
                start, end = end, end + len(trees[i].inner)
                results[i] = torch.cat((results[i][:1], new_features[start:end]))
                branches += [(trees[i], node) for node in newest[i]]
                rows += range(end - len(newest[i]), end)
            self._branch(branches, new_outputs[torch.tensor(rows, device=self.setup.device)])
        return [tree.draft(request.max_drafts) for tree, request in zip(trees, requests, strict=True)]

    def _branch(self, nodes: Sequence[tuple[GrowingTree, int]], outputs: torch.Tensor) -> None:
        """Gives each of `nodes` its most likely children; row i of `outputs` belongs to the i-th."""
        log_probs = self.logits(outputs).float().log_softmax(-1)
        top = log_probs.topk(min(self.options.top_k, log_probs.shape[1]), dim=-1)
        ids = top.indices if self.target_ids is None else self.target_ids[top.indices]
        for (tree, node), tokens, scores in zip(nodes, ids.tolist(), top.values.tolist(), strict=True):
            tree.add_children(node, tokens, scores)

    def _run_inner(
        self, growing: Sequence[tuple[DraftRequest, GrowingTree, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns features and outputs after the inner nodes of all trees, flat."""
        known = np.array([len(request.token_ids) for request, _, _ in growing])
        counts = np.array([len(tree.inner) for _, tree, _ in growing])
        masks = {i: tree.mask() for i, (_, tree, _) in enumerate(growing)}
        self.setup.pages.plan([request.seq_id for request, _, _ in growing], known - 1, counts, masks)
        tokens = np.array([tree.tokens[node] for _, tree, _ in growing for node in tree.inner])
        depths = np.array([tree.depths[node] for _, tree, _ in growing for node in tree.inner])
        return self._run(tokens, torch.cat([part for _, _, part in growing]), np.repeat(known - 2, counts) + depths)

    def _run(
        self, tokens: np.ndarray, features: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(self._to_device(tokens.astype(np.int64)), features, self._to_device(positions))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return on_device(array, self.setup.device)
