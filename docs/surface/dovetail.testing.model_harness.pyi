import torch
from collections.abc import Iterable, Mapping, Sequence
from dovetail.contracts.attention import AttentionBackend, AttentionBatch
from dovetail.contracts.model import CausalLM, ModelFamily, ModelInputs
from dovetail.contracts.operators import Operators
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.nn import AdapterSpace, Communicator
from typing import Any

def without_pages(batch: AttentionBatch) -> AttentionBatch: ...

class ModelHarness:
    def __init__(
        self,
        family: ModelFamily,
        config: Mapping[str, Any],
        weights: Iterable[tuple[str, torch.Tensor]],
        backend_class: type[AttentionBackend],
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = 128,
        block_size: int = 4,
        max_num_seqs: int = 4,
        communicator: Communicator | None = None,
        quantization: QuantizationMethod | None = None,
        operators: Operators | None = None,
        batch_invariant: bool = False,
        layers: range | None = None,
        is_first_stage: bool = True,
        is_last_stage: bool = True,
        adapters: AdapterSpace | None = None,
    ): ...
    context: ...
    model: CausalLM
    max_model_len: int
    block_size: int
    def step(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor: ...
    def plan(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> ModelInputs: ...
    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor: ...
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]: ...
