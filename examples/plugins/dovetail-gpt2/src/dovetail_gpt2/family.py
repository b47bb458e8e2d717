"""What Dovetail asks about GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelContext, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn.planning import planned_size, reasons_against
from dovetail_gpt2.layers import GPT2Model
from dovetail_gpt2.shape import shape_of


class GPT2Family(ModelFamily):
    """GPT-2 and models of its shape."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    architectures = ("GPT2LMHeadModel",)
    preference: ClassVar[int] = 10
    capabilities = ModelCapabilities(
        tensor_parallel=None,
        quantization=True,
        batch_invariant=True,
        hidden_layers=True,
        graph_capture=True,
        stages=True,
    )

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        return planned_size(create, config, shape_of(config).num_positions)

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the model, or a stage of it."""
        return create(config, context)


def create(config: Mapping[str, Any], context: ModelContext) -> GPT2Model:
    """The module of one config.json."""
    return GPT2Model(context, shape_of(config))
