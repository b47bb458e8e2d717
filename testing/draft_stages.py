"""A stage for drafters that ask other drafters (`ComposesDrafters`), which needs no host."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.draft_stages import DraftStage
from dovetail.contracts.speculation import Draft, DraftCapabilities


class ConstantStage(DraftStage):
    """Guesses the same token again and again; where it is to say how sure it is, half sure of each."""

    def __init__(self, name: str, token_id: int, num_tokens: int, confidence: bool):
        self.name = name
        self.capabilities = DraftCapabilities(tensor_parallel=None, confidence=confidence, stateless=True)
        self.num_tokens = num_tokens
        self._token_id = token_id

    def propose(self, max_drafts: Sequence[int]) -> Sequence[Draft | None]:
        """A draft of as many tokens as may be, for every request that wants one."""
        counts = [min(count, self.num_tokens) for count in max_drafts]
        return [self._draft(count) if count > 0 else None for count in counts]

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        """Learns nothing."""
        return None

    def _draft(self, count: int) -> Draft:
        return Draft([self._token_id] * count, confidence=[0.5] * count if self.capabilities.confidence else None)


__all__ = ["ConstantStage"]
