"""Builds a model's module on the meta device, without memory, to find its sizes and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.kv import LatentSpec
from dovetail.contracts.model import CausalLM, ModelContext, ModelNeed, ModelSize, ScoresStates
from dovetail.nn.context import BuildContext
from dovetail.nn.loading import num_parameters

Create = Callable[[Mapping[str, Any], ModelContext], CausalLM]


class PlannedRank:
    """Rank 0 of a group without processes, for modules on the meta device: collectives return tensors of the right
    shape."""

    rank = 0

    def __init__(self, size: int):
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As many as there are ranks."""
        return torch.cat([tensor] * self.size, dim)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Returns `tensor`."""
        return tensor


def planning_context(tensor_parallel: int = 1) -> BuildContext:
    """Returns a context whose modules take no memory."""
    return BuildContext(
        dtype=torch.float32,
        device=torch.device("meta"),
        max_model_len=1,
        kv_dtype="float32",
        communicator=PlannedRank(tensor_parallel),
    )


def planned_size(create: Create, config: Mapping[str, Any], max_model_len: int) -> ModelSize:
    """Returns the exact sizes of the module that `create` builds, counted on its blocks."""
    context = planning_context()
    module = create(config, context)
    if not isinstance(module, torch.nn.Module) or not context.attention_layers:
        raise ModelError("the model has no attention layers")
    with torch.inference_mode():
        embedded = module.embed(torch.zeros(1, dtype=torch.int64, device=context.device))
    first = context.attention_layers[0].layer
    return ModelSize(
        latent_size=_latent_size(context),
        num_parameters=num_parameters(module),
        num_layers=len(context.attention_layers),
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        vocab_size=int(config["vocab_size"]),
        max_model_len=max_model_len,
        hidden_size=embedded.shape[1],
        is_encoder=not first.causal,
    )


def _latent_size(context: ModelContext) -> int:
    """Of the first attention layer, as `ModelSize.latent_size`."""
    cache = context.attention_layers[0].cache
    return cache.latent_size if isinstance(cache, LatentSpec) else 0


def against_size(family: str, size: ModelSize, module: CausalLM, context: ModelContext) -> list[str]:
    """Compares a family's `size` with the model, or the stage of it, that its `create` built in `context`: returns a
    sentence for each difference. Runs embedding and output layer, where the stage has them, on one token, on every
    rank."""
    if not context.attention_layers:
        return [f"the model family {family} builds a stage without attention layers: correct its create()"]
    with torch.inference_mode():
        hidden_size, vocab_size = _ends(size, module, context)
    is_whole = context.is_first_stage and context.is_last_stage
    pairs = (
        ("num_layers", size.num_layers, len(context.attention_layers) if is_whole else size.num_layers),
        *(_first_layer(size, context) if context.is_first_stage else ()),
        ("hidden_size", size.hidden_size, hidden_size),
        ("vocab_size", size.vocab_size, vocab_size),
        ("num_labels > 0", size.num_labels > 0, isinstance(module, ScoresStates)),
        *(("is_encoder", size.is_encoder, not one.layer.causal) for one in context.attention_layers),
    )
    each = f" on each of {context.tp_size} ranks" if context.tp_size > 1 else ""
    differing = dict.fromkeys(pair for pair in pairs if pair[1] != pair[2])
    return [
        f"the model family {family} says {name} {said}{each if name == 'num_kv_heads' else ''}, and builds a model of "
        f"{built}: correct its size()"
        for name, said, built in differing
    ]


def _first_layer(size: ModelSize, context: ModelContext) -> tuple[tuple[str, int, int], ...]:
    """What a size says of the model's first attention layer, and what was built."""
    first = context.attention_layers[0].layer
    return (
        ("num_kv_heads", max(1, size.num_kv_heads // context.tp_size), first.num_kv_heads),
        ("head_size", size.head_size, first.head_size),
        ("latent_size", size.latent_size, _latent_size(context)),
    )


def _ends(size: ModelSize, module: CausalLM, context: ModelContext) -> tuple[int, int]:
    """Elements of a hidden state, and logits of a token, as the module computes them; those of `size` where its stage
    does not. An encoder has no output layer."""
    states = torch.zeros(1, size.hidden_size, dtype=context.dtype, device=context.device)
    if context.is_first_stage:
        states = module.embed(torch.zeros(1, dtype=torch.int64, device=context.device))
    vocab_size = size.vocab_size
    if context.is_last_stage and context.attention_layers[0].layer.causal:
        vocab_size = module.compute_logits(states).shape[1]
    return states.shape[1], vocab_size


def reasons_against(create: Create, need: ModelNeed) -> list[str]:
    """Returns why `create` would refuse `need`: the error of a trial without memory, if it raises one."""
    try:
        create(need.config, planning_context(need.tensor_parallel))
    except ModelError as error:
        return [str(error)]
    except Exception as error:
        # A config may hold anything: a text for a number, a list for a mapping.
        return [f"its config cannot be used: {type(error).__name__}: {error}"]
    return []
