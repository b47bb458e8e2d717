"""Whether steps of a model can be captured in a graph: decided by what its parts declare, before any capture."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.model import CausalLM, ModelContext, ModelFamily
from dovetail.contracts.operators import Operators
from dovetail.nn.adapters import adapter_space
from dovetail.nn.operators import TorchOperators
from dovetail.nn.waiting import MayWait


def why_not_captured(
    family: type[ModelFamily], model: CausalLM, context: ModelContext, backends: Iterable[AttentionBackend]
) -> str | None:
    """The first reason against capturing steps, which names the part that it comes from; None: they can be captured."""
    if not family.capabilities.graph_capture:
        return _undeclared("model family", family, "ModelCapabilities.graph_capture, of contract 1.1")
    method = context.quantization
    if method is not None and not method.capabilities.graph_capture:
        return _undeclared(
            "quantization method", type(method), "QuantizationCapabilities.graph_capture, of contract 1.1"
        )
    if not _declares_capture(context.operators):
        return _undeclared(
            "operator set", type(context.operators), "OperatorsCapabilities.graph_capture, of contract 1.1"
        )
    for backend in backends:
        if not backend.capabilities.graph_capture:
            return _undeclared("attention backend", type(backend), "AttentionCapabilities.graph_capture")
    space = adapter_space(context)
    if space is not None and (reason := space.why_it_waits()) is not None:
        return f"adapters: {reason}"
    assert isinstance(model, torch.nn.Module)
    for name, module in model.named_modules():
        reason = module.why_it_waits() if isinstance(module, MayWait) else None
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _declares_capture(operators: Operators) -> bool:
    """The capability is on by default, so a set says nothing by it that was written before there was one. torch's own
    operators are known to wait for nothing; a class derived from them may."""
    is_known = type(operators) is TorchOperators or operators.contract >= (1, 1)
    return is_known and operators.capabilities.graph_capture


def _undeclared(kind: str, cls: type, capability: str) -> str:
    return (
        f"the {kind} {cls.__name__} does not declare that it can be captured; where it can, its author declares "
        f"{capability}"
    )
