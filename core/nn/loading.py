"""From named checkpoint tensors to the blocks that want them.

Each block with weights is a `WeightHolder`: it says which checkpoint tensors it takes, with their full shapes,
and cuts out its rank's share itself. A fused layer simply takes several. So a model states its checkpoint names
where it creates its layers, and `load_weights` has nothing to know but the exceptions (`WeightRules`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, cast

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor

NamedTensors = Iterable[tuple[str, torch.Tensor]]
NamedWeights = Iterable[tuple[str, torch.Tensor | PackedTensor]]


class WeightHolder(torch.nn.Module, ABC):
    """A block that holds weights."""

    takes_packed: ClassVar[bool] = False
    """Whether `load` takes `PackedTensor`s as well; it must then declare them. Otherwise they come dequantized."""

    @abstractmethod
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Full, unsharded shape of each checkpoint tensor that the block takes, by its name in the checkpoint."""

    @abstractmethod
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Takes this rank's share of one of the `expected` tensors. `tensor` has the expected shape, any dtype, and
        is on the CPU; it must not be written to."""

    def finish(self) -> None:
        """Every expected tensor was given."""
        return None


Expansion = Callable[[re.Match[str], torch.Tensor], NamedTensors]
"""From a match of a tensor's whole name and the tensor to the tensors that it stands for."""


@dataclass(frozen=True)
class WeightRules:
    """How the names of a checkpoint differ from those that the blocks expect."""

    renamed: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement) of `re.sub`, applied to each name, first to last, before anything else."""
    expanded: tuple[tuple[str, Expansion], ...] = ()
    """(pattern of the whole name, function) for tensors that hold several expected ones."""
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.bias", r".*\.masked_bias")
    """Patterns of whole names that checkpoints carry though they can be computed."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name -> the name whose weights it shares: accepted where a checkpoint stores it all the same, and used in its
    stead where a checkpoint stores only this one."""


def expected_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor that `module` takes, with its full shape."""
    return {name: shape for holder in _holders(module) for name, shape in holder.expected().items()}


def num_parameters(module: torch.nn.Module) -> int:
    """Parameters of the whole model, over all ranks; tied weights count once."""
    return sum(prod(shape) for shape in expected_shapes(module).values())


def load_weights(module: torch.nn.Module, weights: NamedWeights, rules: WeightRules | None = None) -> None:
    """Gives each tensor of `weights` to the block that expects it, and finishes the blocks.

    Raises `ModelError` that lists every tensor that is missing, not expected, given twice, or of another shape than
    the config implies.
    """
    rules = rules or WeightRules()
    owners = {name: holder for holder in _holders(module) for name in holder.expected()}
    shapes = expected_shapes(module)
    loaded: set[str] = set()
    problems: list[str] = []
    unexpected: list[str] = []
    for name, tensor in _translated(weights, rules):
        wanted = rules.tied.get(name, name) if name not in owners else name
        if wanted not in owners:
            unexpected.append(f"{name} {list(tensor.shape)}")
        elif tuple(tensor.shape) != shapes[wanted]:
            problems.append(f"{name} has shape {list(tensor.shape)}, the config implies {list(shapes[wanted])}")
            loaded.add(wanted)
        elif wanted not in loaded:
            _give(owners[wanted], wanted, tensor)
            loaded.add(wanted)
        elif wanted == name and name not in rules.tied.values():
            problems.append(f"{name} stands in the checkpoint twice")
    missing = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in loaded]
    _raise_for(missing, unexpected, problems)
    for holder in _holders(module):
        holder.finish()


def _give(holder: WeightHolder, name: str, tensor: torch.Tensor | PackedTensor) -> None:
    if isinstance(tensor, PackedTensor) and not holder.takes_packed:
        tensor = tensor.dequantized()
    # Holders that take packed tensors declare it; of the others none is given here.
    holder.load(name, cast(torch.Tensor, tensor))


def _holders(module: torch.nn.Module) -> list[WeightHolder]:
    return [child for child in module.modules() if isinstance(child, WeightHolder)]


def _translated(weights: NamedWeights, rules: WeightRules) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]:
    """The tensors under the names that blocks expect."""
    for original, tensor in weights:
        name = original
        for pattern, replacement in rules.renamed:
            name = re.sub(pattern, replacement, name)
        if any(re.fullmatch(pattern, name) for pattern in rules.ignored):
            continue
        for pattern, expand in rules.expanded:
            if match := re.fullmatch(pattern, name):
                yield from expand(match, tensor.dequantized() if isinstance(tensor, PackedTensor) else tensor)
                break
        else:
            yield name, tensor


def _raise_for(missing: list[str], unexpected: list[str], problems: list[str]) -> None:
    parts = [
        f"{title} ({len(entries)}): {_shortened(entries)}"
        for title, entries in (("missing", missing), ("not expected", unexpected), ("wrong", problems))
        if entries
    ]
    if parts:
        raise ModelError(
            "the checkpoint does not fit the model's config: "
            + "; ".join(parts)
            + ". Check that config.json belongs to these weights and that every shard is there."
        )


def _shortened(entries: list[str], limit: int = 12) -> str:
    more = f", and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entries[:limit]) + more
