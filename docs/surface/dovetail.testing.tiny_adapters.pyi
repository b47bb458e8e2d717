from pathlib import Path
from typing import Any

PREFIX = 'base_model.model.'
PROJECTIONS = ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj')
MLP = ('mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj')
EVERY_LAYER = (*PROJECTIONS, *MLP)
def save_adapter(
    directory: Path,
    model: Path,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = EVERY_LAYER,
    strength: float = 0.5,
    **config: Any,
) -> Path: ...
def scale_of(config: dict[str, Any]) -> float: ...
def save_merged(directory: Path, model: Path, adapter: Path) -> Path: ...
