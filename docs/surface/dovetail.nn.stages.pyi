import torch
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dovetail.contracts.model import ModelContext, ModelInputs, ModelOutputs
from dovetail.nn.loading import NamedWeights, WeightRules
from typing import ClassVar

MakeLayer = Callable[[str, int], torch.nn.Module]
MakeNorm = Callable[[str], torch.nn.Module]
def check_inputs(
    inputs: ModelInputs,
    *,
    is_first_stage: bool = True,
    gives_hidden_layers: bool = False,
    skips_layers: bool = False,
    takes_adapters: bool = False,
    takes_token_types: bool = False,
) -> None: ...
def check_whole(context: ModelContext, family: str) -> None: ...

class StagedCausalLM(torch.nn.Module, ABC):
    gives_hidden_layers: ClassVar[bool] = False
    skips_layers: ClassVar[bool] = False
    def __init__(
        self,
        context: ModelContext,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        make_layer: MakeLayer,
        make_norm: MakeNorm,
        is_tied: bool,
        head_bias: bool = False,
        rules: WeightRules | None = None,
    ): ...
    embed_tokens: ...
    layers: ...
    norm: ...
    lm_head: ...
    held_layers: ...
    num_layers: int
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor: ...
    def forward(self, inputs: ModelInputs) -> ModelOutputs: ...
    @abstractmethod
    def run_layers(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def run_other_layers(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        skipped: Set[int],
    ) -> torch.Tensor: ...
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def load_weights(self, weights: NamedWeights, partial: bool = False) -> None: ...
