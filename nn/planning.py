"""What a model would be, found out without memory: its module on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelContext, ModelNeed, ModelSize
from dovetail.nn.context import BuildContext
from dovetail.nn.loading import num_parameters

Create = Callable[[Mapping[str, Any], ModelContext], CausalLM]


class PlannedRank:
    """Rank 0 of a group that does not exist: enough to divide a model, refuses to communicate."""

    rank = 0

    def __init__(self, size: int):
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("a planned model cannot run")

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("a planned model cannot run")

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("a planned model cannot run")


def planning_context(tensor_parallel: int = 1) -> BuildContext:
    """A context whose modules take no memory."""
    return BuildContext(
        dtype=torch.float32,
        device=torch.device("meta"),
        max_model_len=1,
        kv_dtype="float32",
        communicator=PlannedRank(tensor_parallel),
    )


def planned_size(create: Create, config: Mapping[str, Any], max_model_len: int) -> ModelSize:
    """Sizes of the module that `create` builds; exact, since its own blocks are counted."""
    context = planning_context()
    module = create(config, context)
    if not isinstance(module, torch.nn.Module) or not context.attention_layers:
        raise ModelError("the model has no attention layers")
    first = context.attention_layers[0].layer
    return ModelSize(
        num_parameters=num_parameters(module),
        num_layers=len(context.attention_layers),
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        vocab_size=int(config["vocab_size"]),
        max_model_len=max_model_len,
        hidden_size=int(config.get("hidden_size") or 0),
    )


def reasons_against(create: Create, need: ModelNeed) -> list[str]:
    """Why `create` would refuse `need`: the error of a trial without memory, if it raises one."""
    try:
        create(need.config, planning_context(need.tensor_parallel))
    except ModelError as error:
        return [str(error)]
    except Exception as error:
        # A config may hold anything: a text for a number, a list for a mapping.
        return [f"its config cannot be used: {type(error).__name__}: {error}"]
    return []
