import torch
from dataclasses import dataclass
from dovetail.contracts.model import ModelContext
from dovetail.nn.collectives import CallsCollectives, Collective
from dovetail.nn.routing import GroupRouting
from dovetail.nn.waiting import MayWait


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    router: str = 'gate'
    experts: str = 'experts'
    gate: str = 'gate_proj'
    up: str = 'up_proj'
    down: str = 'down_proj'
    shared: str = 'shared_expert'


@dataclass(frozen=True, kw_only=True)
class SparseShape:
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    normalize: bool
    hidden_act: str
    shared_intermediate_size: int = 0
    has_sigmoid: bool = False
    weighs_inputs: bool = False
    shared_gate: bool = True
    routing: GroupRouting | None = None


class Expert(torch.nn.Module):
    def __init__(self, context: ModelContext, name: str, shape: SparseShape, names: ExpertNames): ...
    gate_up_proj: ...
    down_proj: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class SparseMoE(torch.nn.Module, MayWait, CallsCollectives):
    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: SparseShape,
        names: ExpertNames | None = None,
    ): ...
    router: ...
    experts: ...
    shared: ...
    def why_it_waits(self) -> str | None: ...
    def collectives(self) -> tuple[Collective, ...]: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class SharedExpert(torch.nn.Module):
    def __init__(self, context: ModelContext, name: str, shape: SparseShape): ...
    gate: ...
    mlp: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
