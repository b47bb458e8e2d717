"""Requests go to the replica with the least work, whatever its prefix cache has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import FollowsRequests, ReplicaState, RoutedRequest, RouterSetup
from dovetail.plugins.routers.placements import Placement, Placements


class LeastTokensOptions(PluginOptions):
    """What a config may say besides the name."""

    expected_output_tokens: int = Field(default=256, ge=0)
    """Tokens that a request is expected to generate, where its max_tokens is not lower."""


class LeastTokens(FollowsRequests):
    """Sends each request to the replica with the fewest outstanding tokens.

    Those of a request are its prompt, until it is computed, and its expected output, until it ends.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    preference: ClassVar[int] = 5
    Options = LeastTokensOptions
    options: LeastTokensOptions

    def __init__(self, options: PluginOptions, setup: RouterSetup):
        super().__init__(options, setup)
        self._placements = Placements()

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaState]) -> int:
        placements = self._placements
        up = (state.index for state in replicas if state.is_up)
        index = min(up, key=lambda i: (placements.tokens(i), placements.count(i), i))
        expected = min(request.max_tokens, self.options.expected_output_tokens)
        placements.place(request.request_id, Placement(index, request.num_prompt_tokens, expected))
        return index

    def prefilled(self, request_id: str) -> None:
        self._placements.prefilled(request_id)

    def finished(self, request_id: str) -> None:
        self._placements.finished(request_id)

    def replica_lost(self, replica: int) -> None:
        for _ in self._placements.lost(replica):
            pass
