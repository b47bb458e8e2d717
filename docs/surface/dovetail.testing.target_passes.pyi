import numpy as np, torch
from collections.abc import Mapping, Sequence, Set
from dovetail.contracts.draft_target import TargetPasses


class SuitePasses(TargetPasses):
    def __init__(self, vocab_size: int, hidden_size: int, num_layers: int): ...
    def begin(self, num_known: Mapping[int, int]) -> None: ...
    def run(
        self,
        seq_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        token_ids: np.ndarray,
        skipped: Set[int],
    ) -> torch.Tensor: ...
