from collections.abc import Sequence
from dovetail.contracts.draft_stages import DraftStage
from dovetail.contracts.speculation import Draft

__all__ = [
    "ConstantStage",
]

class ConstantStage(DraftStage):
    def __init__(self, name: str, token_id: int, num_tokens: int, confidence: bool): ...
    name: str
    capabilities: ...
    num_tokens: int
    def propose(self, max_drafts: Sequence[int]) -> Sequence[Draft | None]: ...
    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None: ...
