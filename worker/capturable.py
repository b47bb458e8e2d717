"""Whether steps of a model can be captured in a graph: decided by what its parts declare, before any capture."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.model import CausalLM, ModelContext, ModelFamily
from dovetail.nn.waiting import MayWait


def why_not_captured(
    family: type[ModelFamily], model: CausalLM, context: ModelContext, backends: Iterable[AttentionBackend]
) -> str | None:
    """The first reason against capturing steps, which names the part that it comes from; None: they can be captured."""
    if not family.capabilities.graph_capture:
        return f"the model family {family.__name__} does not declare that its passes can be captured"
    method = context.quantization
    if method is not None and not method.capabilities.graph_capture:
        return f"the quantization method {type(method).__name__} does not declare that its products can be captured"
    if not context.operators.capabilities.graph_capture:
        return f"the operators {type(context.operators).__name__} cannot be captured"
    for backend in backends:
        if not backend.capabilities.graph_capture:
            return f"the attention backend {type(backend).__name__} cannot be captured"
    assert isinstance(model, torch.nn.Module)
    for name, module in model.named_modules():
        reason = module.why_it_waits() if isinstance(module, MayWait) else None
        if reason is not None:
            return f"{name}: {reason}"
    return None
