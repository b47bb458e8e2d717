"""Loads named checkpoint tensors into a module's blocks.

Each block with weights is a `WeightHolder`: it declares the checkpoint tensors that it takes, with their full shapes,
and cuts out its rank's share itself. A fused layer takes several. So a model states its checkpoint names where it
creates its layers, and `load_weights` gets only the exceptions (`WeightRules`).
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, cast

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor

logger = logging.getLogger("dovetail.nn")

NamedTensors = Iterable[tuple[str, torch.Tensor]]
NamedWeights = Iterable[tuple[str, torch.Tensor | PackedTensor]]


class WeightHolder(torch.nn.Module, ABC):
    """A block that holds weights."""

    takes_packed: ClassVar[bool] = False
    """Whether `load` takes `PackedTensor`s as well; its signature must then declare them. Otherwise it gets them
    dequantized."""

    @abstractmethod
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the full, unsharded shape of each checkpoint tensor that the block takes, by its name in the
        checkpoint."""

    @abstractmethod
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Loads this rank's share of one of the `expected` tensors. `tensor` has the expected shape, any dtype, and is
        on the CPU; do not write to it."""

    def finish(self) -> None:
        """Called when every expected tensor was given; in a later round of partial loading, one or more of them."""
        return None

    def sources(self) -> Sequence[WeightHolder]:
        """Other blocks whose weights the block uses: it is finished after them, whenever one of them was."""
        return ()


Expansion = Callable[[re.Match[str], torch.Tensor], NamedTensors]
"""Splits a tensor, given the match of its whole name, into named tensors."""


@dataclass(frozen=True, kw_only=True)
class WeightRules:
    """How a checkpoint's names differ from those that the blocks expect."""

    renamed: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement) of `re.sub`, applied in order to each name before all other rules."""
    expanded: tuple[tuple[str, Expansion], ...] = ()
    """(pattern of the whole name, function) for tensors that hold several expected ones."""
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.bias", r".*\.masked_bias")
    """Patterns of whole names of tensors that are ignored, since they can be computed."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Name -> the name whose weights it shares. A checkpoint may store both, or only the first, which is then used for
    the second."""


def expected_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns every checkpoint tensor that `module` takes, with its full shape."""
    return {name: shape for holder in _holders(module) for name, shape in holder.expected().items()}


def num_parameters(module: torch.nn.Module) -> int:
    """Returns the number of parameters of the whole model, over all ranks; tied weights count once."""
    return sum(prod(shape) for shape in expected_shapes(module).values())


def load_weights(
    module: torch.nn.Module, weights: NamedWeights, rules: WeightRules | None = None, *, partial: bool = False
) -> None:
    """Gives each tensor of `weights` to the block that expects it, and finishes the blocks.

    Warns of tensors that are no part of the model, such as a vision tower with a text model. Raises `ModelError` that
    lists every tensor that is missing, unexpected within a block of the model, given twice, of another shape than the
    config implies, or different from the tensor to which it should be tied.

    `partial`: loads some of the tensors into blocks that were loaded before. Other tensors keep their values. Only
    blocks that got a tensor, and blocks that use the weights of those, are finished. Raises `ModelError` for any tensor
    that no block expects.
    """
    rules = rules or WeightRules()
    owners = {name: holder for holder in _holders(module) for name in holder.expected()}
    shapes = expected_shapes(module)
    loaded: set[str] = set()
    tied: dict[str, tuple[str, torch.Tensor]] = {}
    problems: list[str] = []
    unexpected: dict[str, str] = {}
    for name, tensor in translated(weights, rules):
        wanted = rules.tied.get(name, name) if name not in owners else name
        if wanted not in owners:
            unexpected[name] = f"{name} {list(tensor.shape)}"
        elif tuple(tensor.shape) != shapes[wanted]:
            problems.append(f"{name} has shape {list(tensor.shape)}, the config implies {list(shapes[wanted])}")
            loaded.add(wanted)
        elif wanted not in loaded:
            _give(owners[wanted], wanted, tensor)
            loaded.add(wanted)
        elif wanted == name and name not in rules.tied.values():
            problems.append(f"{name} is in the checkpoint twice")
        if wanted in rules.tied.values():
            first, rows = tied.setdefault(wanted, (name, _some_rows(tensor)))
            if first != name and not are_equal(rows, _some_rows(tensor)):
                problems.append(f"{first} and {name} differ, and the config says that they are tied: {_UNTIE}")
    missing = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in loaded and not partial]
    foreign = [] if partial else foreign_names(unexpected, shapes)
    if missing or problems or len(foreign) < len(unexpected):
        _raise_for(missing, list(unexpected.values()), problems, partial=partial)
    if foreign:
        listed = _shortened([unexpected[name] for name in foreign])
        logger.warning(
            "tensors of the checkpoint that are no part of the model are left out (%d): %s", len(foreign), listed
        )
    given = {owners[name] for name in loaded}
    for holder in _holders(module):
        if not partial or holder in given or any(source in given for source in holder.sources()):
            holder.finish()


_NUM_COMPARED = 64
_UNTIE = "set tie_word_embeddings to false in model.hf_overrides"


def foreign_names(unexpected: Iterable[str], expected: Iterable[str]) -> list[str]:
    """Returns those of the `unexpected` tensors that are no part of a model which takes the `expected` ones.

    A tensor inside a block of the model, such as a bias with its weight or a norm in a numbered layer, is a part: a
    model without it would compute something else.
    """
    blocks: set[str] = set()
    for name in expected:
        parts = name.split(".")
        numbered = [depth for depth, part in enumerate(parts[:-1], 1) if part.isdigit()]
        # Numbers count layers; what comes before the first one holds layers and is none.
        first = numbered[0] if numbered else len(parts) - 1
        blocks.update(".".join(parts[:depth]) for depth in range(first, len(parts)))
    return [name for name in unexpected if not _is_within(name, blocks)]


def _is_within(name: str, blocks: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in blocks for depth in range(1, len(parts)))


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes. True on the meta device."""
    if one.shape != other.shape or one.is_meta:
        return one.shape == other.shape
    return torch.equal(one, other.to(one.dtype)) if one.dtype != other.dtype else torch.equal(one, other)


def _some_rows(tensor: torch.Tensor | PackedTensor) -> torch.Tensor:
    """A few rows of a table and its last ones, where tokens are added: enough to tell two tables apart, and small
    enough to be kept while the rest is loaded."""
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        return tensor  # there is nothing to keep
    step = max(1, tensor.shape[0] // _NUM_COMPARED)
    parts = [tensor[index : index + 1] for index in range(0, tensor.shape[0], step)]
    parts.append(tensor[max(0, tensor.shape[0] - _NUM_COMPARED) :])
    return torch.cat([part.dequantized() if isinstance(part, PackedTensor) else part for part in parts])


def _give(holder: WeightHolder, name: str, tensor: torch.Tensor | PackedTensor) -> None:
    if isinstance(tensor, PackedTensor) and not holder.takes_packed:
        tensor = tensor.dequantized()
    # Holders that take packed tensors declare it; of the others none is given here.
    holder.load(name, cast(torch.Tensor, tensor))


def _holders(module: torch.nn.Module) -> list[WeightHolder]:
    return [child for child in module.modules() if isinstance(child, WeightHolder)]


def translated(weights: NamedWeights, rules: WeightRules) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]:
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


def _raise_for(missing: list[str], unexpected: list[str], problems: list[str], *, partial: bool) -> None:
    parts = [
        f"{title} ({len(entries)}): {_shortened(entries)}"
        for title, entries in (("missing", missing), ("not expected", unexpected), ("wrong", problems))
        if entries
    ]
    remedy = "" if partial else " and that every shard is there"
    raise ModelError(
        f"{'these weights do' if partial else 'the checkpoint does'} not fit the model's config: {'; '.join(parts)}. "
        f"Check that config.json belongs to these weights{remedy}."
    )


def _shortened(entries: list[str], limit: int = 12) -> str:
    more = f", and {len(entries) - limit} more" if len(entries) > limit else ""
    return ", ".join(entries[:limit]) + more
