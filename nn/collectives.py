"""Which collectives a model's modules call in each pass, before anything runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dovetail.contracts.model import ModelContext, ModelFamily

Part = Literal["embedding", "layers", "output"]
"""Where a module is called: "embedding" on the first pipeline stage alone, "output" on the last alone, for the rows
whose logits are wanted."""


@dataclass(frozen=True)
class Collective:
    """One call of the module's `Communicator` in each pass."""

    operation: Literal["all_reduce", "all_gather"]
    width: int
    """Elements of the model's dtype that this rank gives for each row: each token that the pass computes, or in
    "output" each row whose logits are computed."""
    part: Part = "layers"


class CallsCollectives(ABC):
    """A module that calls `ModelContext.communicator` itself. `dovetail explain` counts what it says; blocks inside it
    count themselves."""

    @abstractmethod
    def collectives(self) -> tuple[Collective, ...]:
        """Returns the calls of one pass, of several ranks; empty for one rank, which calls none that does anything."""


def planned_collectives(
    family: ModelFamily, config: Mapping[str, Any], context: ModelContext
) -> tuple[Collective, ...]:
    """Builds the module that `family` creates in `context`, which should be on the meta device, and returns the calls
    of one pass through its stage. Raises `ModelError` as `ModelFamily.create` does."""
    module = family.create(config, context)
    assert isinstance(module, torch.nn.Module)
    is_called = {"embedding": context.is_first_stage, "layers": True, "output": context.is_last_stage}
    return tuple(call for call in _all(module) if is_called[call.part])


def _all(module: torch.nn.Module) -> Iterator[Collective]:
    for child in module.modules():
        if isinstance(child, CallsCollectives):
            yield from child.collectives()
