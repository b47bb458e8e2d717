"""What an update writes to: the model, or a drafter. Each says what is wrong with tensors before one is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from re import fullmatch
from typing import Any

import torch

from dovetail.config.resolved import Component
from dovetail.contracts.draft_target import UpdatesWeights
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM
from dovetail.contracts.weights import PackedTensor, TensorInfo
from dovetail.nn.context import BuildContext
from dovetail.nn.loading import WeightRules
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.pooling.head import ScoreHead
from dovetail.worker.weight_update.rehearsal import rehearsal_context
from dovetail.worker.weight_update.staged import StagedWeights

NamedWeights = Iterable[tuple[str, torch.Tensor | PackedTensor]]
_INTEGERS = frozenset({"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})
_NO_WEIGHTS = _INTEGERS | {"complex32", "complex64", "complex128"}


class UpdateTarget(ABC):
    """One module with weights."""

    packed_formats: frozenset[str] = frozenset()
    """Formats in which tensors may come packed."""

    @abstractmethod
    def check(self, staged: StagedWeights, *, partial: bool) -> None:
        """Raises `ModelError` with names and shapes where tensors are missing, unknown, or of another shape or kind, or
        differ where they are tied. Writes nothing."""

    @abstractmethod
    def load(self, weights: NamedWeights, *, partial: bool) -> None:
        """Writes them. After an error the module has some new weights and some old ones."""


class ModuleTarget(UpdateTarget):
    """A model of a family: the engine's, or a drafter's."""

    def __init__(
        self,
        plugins: LoadedPlugins,
        family: Component,
        hf_config: Mapping[str, Any],
        model: CausalLM,
        context: BuildContext,
        head: ScoreHead | None = None,
    ):
        """`context`: the one in which `model` was built. `head`: the model's score head, whose weight comes with the
        others."""
        self._head = head
        self._plugins = plugins
        self._family = family
        self._hf_config = hf_config
        self._model = model
        self._context = context
        if context.quantization is not None:
            self.packed_formats = context.quantization.capabilities.packed_formats

    def check(self, staged: StagedWeights, *, partial: bool) -> None:
        """Loads the tensors into a module without memory, by the family's own rules."""
        _check_dtypes(staged.infos)
        tensors = staged.tensors()
        if self._head is not None:
            names = {info.name for info in self._head.others(staged.infos, partial=partial)}
            tensors = ((name, tensor) for name, tensor in tensors if name in names)
        with torch.inference_mode():
            module: CausalLM = self._plugins.create(self._family).create(
                self._hf_config, rehearsal_context(self._context)
            )
            module.load_weights(((name, _unread(tensor)) for name, tensor in tensors), partial=partial)

    def load(self, weights: NamedWeights, *, partial: bool) -> None:
        with torch.inference_mode():
            tensors = weights if self._head is None else self._head.sift(weights, partial=partial)
            self._model.load_weights(tensors, partial=partial)


class DrafterTarget(UpdateTarget):
    """A drafter that read its weights itself."""

    def __init__(self, drafter: UpdatesWeights):
        self._drafter = drafter

    def check(self, staged: StagedWeights, *, partial: bool) -> None:
        _check_dtypes(staged.infos)
        expected = self._drafter.expected_weights()
        given = {info.name: tuple(info.shape) for info in staged.infos}
        problems = [f"{name} {list(shape)} is not expected" for name, shape in given.items() if name not in expected]
        problems += [
            f"{name} has shape {list(shape)}, expected {list(expected[name])}"
            for name, shape in given.items()
            if name in expected and shape != tuple(expected[name])
        ]
        if not partial:
            problems += [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in given]
        if problems:
            more = f", and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise ModelError(f"these weights do not fit the drafter: {'; '.join(problems[:12])}{more}")

    def load(self, weights: NamedWeights, *, partial: bool) -> None:
        numbers = ((name, one.dequantized() if isinstance(one, PackedTensor) else one) for name, one in weights)
        with torch.inference_mode():
            self._drafter.load_weights(numbers, partial=partial)


def _check_dtypes(infos: Sequence[TensorInfo]) -> None:
    """Raises `ModelError` for weights that are no floating-point numbers. Masks that checkpoints may hold are passed
    over when weights are loaded, whatever they are."""
    problems = [
        f"{info.name} is {info.dtype}"
        for info in infos
        if info.dtype in _NO_WEIGHTS and not any(fullmatch(pattern, info.name) for pattern in WeightRules().ignored)
    ]
    if problems:
        raise ModelError(f"weights are floating-point numbers: {', '.join(problems[:12])}")


def _unread(weight: torch.Tensor | PackedTensor) -> torch.Tensor:
    """What a rehearsal looks at: the tensor itself, of which few rows are compared where it is tied to another; of a
    packed one, which would be unpacked, the shape."""
    if isinstance(weight, torch.Tensor):
        return weight
    return torch.empty(weight.shape, device="meta", dtype=torch.float32)
