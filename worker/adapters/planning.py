"""The layers of a config's model that take adapters, without memory for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from dovetail.config.resolved import ResolvedConfig, ResolvedLoRA
from dovetail.contracts.model import ModelFamily
from dovetail.registry.components import create_class

if TYPE_CHECKING:
    from dovetail.nn.adapters import AdapterSpace


def plan_space(config: ResolvedConfig, lora: ResolvedLoRA) -> AdapterSpace:
    """The slots on one rank."""
    import torch  # most engines serve no adapters

    from dovetail.nn.adapters import AdapterSpace
    from dovetail.nn.planning import planning_context

    context = planning_context(config.tensor_parallel)
    space = AdapterSpace(lora.max_loras, lora.max_rank, getattr(torch, lora.dtype), context.device)
    family, options = create_class(config.model_family)
    cast(type[ModelFamily], family)(options).create(config.model.hf_config, replace(context, adapters=space))
    return space


def slot_bytes(config: ResolvedConfig) -> int:
    """Bytes of all slots on one rank; 0 where no adapters are served."""
    return 0 if config.lora is None else config.lora.max_loras * plan_space(config, config.lora).bytes_per_slot
