"""How GPT-2's checkpoints name and store what the blocks of `dovetail.nn` expect."""

from __future__ import annotations

import re

import torch

from dovetail.nn import WeightRules

_NAMES = (
    # Checkpoints of the bare model, the first ones among them, have no "transformer." in front.
    (r"^(transformer\.)?h\.", "model.layers."),
    (r"^(transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(transformer\.)?ln_f\.", "model.norm."),
    (r"\.attn\.c_proj\.", ".attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)


def _turn(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Conv1D stores [in, out], a linear layer [out, in]."""
    return [(match[0], _turned(tensor))]


def _split(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Queries, keys and values lie side by side, in the weight [hidden, 3 hidden] and in the bias [3 hidden]."""
    parts = zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3, dim=-1), strict=True)
    return [(f"{match[1]}.attn.{name}.{match[2]}", _turned(part)) for name, part in parts]


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous()  # a bias stays as it is


def weight_rules(*, has_positions: bool) -> WeightRules:
    """`has_positions`: whether this stage of the model holds the table of positions."""
    ignored = WeightRules().ignored if has_positions else (*WeightRules().ignored, r"model\.embed_positions\..*")
    expanded = (
        (r"(.*)\.attn\.c_attn\.(weight|bias)", _split),
        (r".*\.(o_proj|up_proj|down_proj)\.weight", _turn),
    )
    return WeightRules(renamed=_NAMES, expanded=expanded, ignored=ignored)
