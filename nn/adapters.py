"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685): y = W x + scale * B A x.

Several adapters lie in memory at once, each in a slot, and every token of a step says which one it has. Linear layers
register in the space of their context, and add their share of the adapters while rows are bound to it. Of a sharded
layer each rank holds the rows of B, or the columns of A, that belong to its share of the weight, so that the ranks'
results come together as those of the weights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.model import AdapterRows, ModelContext
from dovetail.contracts.operators import AddsLowRank, AddsNarrowLowRank
from dovetail.nn.loading import WeightRules, translated
from dovetail.nn.waiting import MayWait

if TYPE_CHECKING:
    from dovetail.nn.linear import LinearPart

_LISTED = 8


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter's matrices for one linear layer."""

    a: torch.Tensor
    """[rank, in_features]."""
    b: torch.Tensor
    """[out_features, rank]."""
    scale: float = 1.0
    """Factor of b a x: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""

    @property
    def rank(self) -> int:
        """Number of rows of a."""
        return self.a.shape[0]


Layers = Mapping[str, LowRank]
"""One adapter: by the dotted name of a layer, as the checkpoint's weights spell it without ".weight"."""


class AdapterSpace(MayWait):
    """The slots for adapters of one module on one rank, and the rows that are bound for a forward pass.

    Tensors are made, zero-filled, when layers register, on the device; on "meta" they take no memory, which is enough
    for `check` and `bytes_per_slot`.
    """

    def __init__(self, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device):
        self.max_loras = max_loras
        """Number of slots."""
        self.max_rank = max_rank
        self.dtype = dtype
        """Of the slots: that of the rows, or a narrower one. Sums are no narrower than float32 in any case."""
        self.device = device
        self.rules = WeightRules()
        """How the checkpoint's names differ from those of the module's layers; `StagedCausalLM` sets them."""
        self.is_open = True
        """Whether layers that are made now register."""
        self.rows: AdapterRows | None = None
        """Those of the pass under way."""
        self.groups: Sequence[tuple[int, torch.Tensor]] = ()
        """Slots that `rows` has, each with the numbers of its rows."""
        self.layers: list[LayerAdapters] = []
        self._owners: dict[str, tuple[LayerAdapters, int]] = {}
        """By a part's name: its layer, and its number in that."""

    def why_it_waits(self) -> str | None:
        """Without an operator set that adds adapters, for the slots of the rows."""
        if all(layer.adds is not None for layer in self.layers):
            return None
        return (
            "the host waits for the adapter of each token, unless model.operators add adapters in"
            f" {str(self.dtype).removeprefix('torch.')}, as native and triton do"
        )

    def register(self, context: ModelContext, parts: Sequence[LinearPart]) -> LayerAdapters:
        """Makes room for the adapters of a layer of these parts. Raises `ModelError` for a part that comes twice."""
        layer = LayerAdapters(self, context, parts)
        for number, part in enumerate(parts):
            if part.source in self._owners:
                raise ModelError(f"two linear layers are called {part.source}, so that no adapter can tell them apart")
            self._owners[part.source] = layer, number
        self.layers.append(layer)
        return layer

    def expected(self) -> dict[str, tuple[int, int]]:
        """Returns (out_features, in_features) over all ranks of each layer that takes adapters, by its name in the
        module. `translated` maps a checkpoint's names to these."""
        return {name: layer.parts[number].shape for name, (layer, number) in self._owners.items()}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes on this rank that one adapter takes, whatever its rank."""
        tensors = [tensor for layer in self.layers for tensor in (layer.a, layer.b)]
        return sum(prod(tensor.shape[1:]) * tensor.itemsize for tensor in tensors)

    def translated(self, layers: Layers) -> dict[str, LowRank]:
        """Returns an adapter by the module's own names: layers that a checkpoint stores as one are split, and rows of B
        are reordered, as the rows of the weights are. Layers of other stages are left out. Raises `ModelError` for
        rows that cannot be split so, and for a layer that comes twice, alone and in one that is split."""
        found: dict[str, LowRank] = {}
        for name, given in layers.items():
            try:
                parts = list(translated([(f"{name}.weight", given.b)], self.rules))
            except (RuntimeError, ValueError) as error:  # what torch raises for shapes that do not fit
                shape = list(given.b.shape)
                raise ModelError(f"B of {name} {shape} cannot be split as the model's weights are: {error}") from error
            for weight, b in parts:
                own = weight.removesuffix(".weight")
                if own in found:
                    raise ModelError(f"the adapter has {own} twice, the second time in {name}")
                assert isinstance(b, torch.Tensor)  # as it was given
                found[own] = LowRank(given.a, b, given.scale)
        return found

    def check(self, layers: Layers) -> None:
        """Raises `ModelError` that lists what does not fit the module: unknown layers, wrong shapes, ranks beyond
        `max_rank`."""
        self._checked(layers)

    def load(self, slot: int, layers: Layers) -> None:
        """Places an adapter in a slot, in place of what was there. Raises `ModelError` as `check` does, and then leaves
        the slot as it was."""
        placed = self._checked(layers)
        self.clear(slot)
        for name, given in placed.items():
            layer, number = self._owners[name]
            layer.place(slot, number, given)
        for layer in self.layers:
            layer.settle(slot)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self._check_slot(slot)
        for layer in self.layers:
            layer.clear(slot)

    @contextmanager
    def bound(self, rows: AdapterRows) -> Iterator[None]:
        """Layers add the adapters of these rows meanwhile, and only then: another pass over the same layers has none
        unless it binds its own."""
        before = self.rows, self.groups
        self.rows, self.groups = rows, self._grouped(rows) if self.why_it_waits() else ()
        try:
            yield
        finally:
            self.rows, self.groups = before

    def _grouped(self, rows: AdapterRows) -> Sequence[tuple[int, torch.Tensor]]:
        """Waits for the device. Where rows must not change each other's bits, each is a group."""
        slots = rows.slots.tolist()
        if any(layer.is_batch_invariant for layer in self.layers):
            return [(slot, torch.tensor([i], device=self.device)) for i, slot in enumerate(slots) if slot >= 0]
        return [
            (slot, torch.tensor([i for i, other in enumerate(slots) if other == slot], device=self.device))
            for slot in sorted(set(slots) - {-1})
        ]

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot {slot} of {self.max_loras}")

    def _checked(self, layers: Layers) -> dict[str, LowRank]:
        problems = [
            f"{name} has A {list(given.a.shape)} and B {list(given.b.shape)}, which are no pair of one rank"
            for name, given in layers.items()
            if given.a.dim() != 2 or given.b.dim() != 2 or given.a.shape[0] != given.b.shape[1]
        ]
        too_large = max((given.rank for given in layers.values()), default=0)
        if too_large > self.max_rank:
            problems.append(f"its rank is {too_large}, and slots hold up to {self.max_rank}: raise lora.max_rank")
        if problems:
            raise ModelError(_listed(problems))
        found = self.translated(layers)
        expected = self.expected()
        unknown = [name for name in found if name not in expected]
        if unknown:
            problems.append(f"this model has no linear layer that takes adapters called {', '.join(unknown[:_LISTED])}")
        for name, given in found.items():
            shape = given.b.shape[0], given.a.shape[1]
            if name in expected and shape != expected[name]:
                problems.append(f"{name} is for a layer {list(shape)}, and the model's is {list(expected[name])}")
        if problems:
            raise ModelError(_listed(problems))
        return found


class LayerAdapters:
    """All adapters' shares of one linear layer on one rank; made by `AdapterSpace.register`."""

    def __init__(self, space: AdapterSpace, context: ModelContext, parts: Sequence[LinearPart]):
        self.parts = tuple(parts)
        columns, out_features = parts[0].take[1], parts[-1].rows.stop
        slots, rank = space.max_loras, space.max_rank
        given: dict[str, Any] = {"dtype": space.dtype, "device": space.device}
        self.a = torch.zeros(slots, len(parts), rank, columns.stop - columns.start, **given)
        """[slots, parts, max_rank, in_features of this rank]."""
        self.b = torch.zeros(slots, rank, out_features, **given)
        """[slots, max_rank, out_features of this rank], turned, the scale multiplied in."""
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=space.device)
        """int32 [slots]: the highest rank among the parts; 0 for an adapter that leaves the layer as it is."""
        starts = [*(part.rows.start for part in parts), out_features]
        self.part_starts = torch.tensor(starts, dtype=torch.int32, device=space.device)
        """int32 [parts + 1]: the first output of each part, and the number of outputs."""
        operators = context.operators
        extra = AddsLowRank if space.dtype == context.dtype else AddsNarrowLowRank
        self.adds = operators if isinstance(operators, extra) else None
        """The operators that add adapters of this dtype; None: torch does."""
        self.is_batch_invariant = context.batch_invariant
        """Whether a row's result bits must not depend on the other rows."""
        self._space = space
        self._ranks = [0] * slots
        """`ranks`, on the host."""

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the adapters of the rows that are bound, if any: x is the layer's input [T, in_features], y its output
        [T, out_features], which is changed and returned."""
        rows = self._space.rows
        if rows is None:
            return y
        if self.adds is not None:
            self.adds.add_low_rank(y, x, self.a, self.b, self.part_starts, self.ranks, rows.slots)
        else:
            self._add_by_slot(y, x)
        return y

    def _add_by_slot(self, y: torch.Tensor, x: torch.Tensor) -> None:
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        for slot, rows in self._space.groups:
            rank = self._ranks[slot]
            if not rank:
                continue
            inner = torch.einsum("ti,pri->tpr", x[rows].to(wide), self.a[slot, :, :rank].to(wide))
            b = self.b[slot, :rank].to(wide)
            added = torch.cat([inner[:, i] @ b[:, part.rows] for i, part in enumerate(self.parts)], dim=1)
            y[rows] = (y[rows].to(wide) + added).to(y.dtype)

    def place(self, slot: int, number: int, given: LowRank) -> None:
        """Copies this rank's share for one part; `settle` comes after the last."""
        part = self.parts[number]
        self.a[slot, number, : given.rank].copy_(given.a[:, part.take[1]])
        # Multiplied before it is rounded to the dtype.
        self.b[slot, : given.rank, part.rows].copy_(given.b[part.take[0]].T.float() * given.scale)
        self._ranks[slot] = max(self._ranks[slot], given.rank)

    def settle(self, slot: int) -> None:
        """Lets passes see what was placed."""
        self.ranks[slot] = self._ranks[slot]

    def clear(self, slot: int) -> None:
        """Fills a slot with zeros."""
        for tensor in (self.a, self.b, self.ranks):
            tensor[slot].zero_()
        self._ranks[slot] = 0


def adapter_space(context: ModelContext) -> AdapterSpace | None:
    """Returns the space in which layers of a context register, None where they take no adapters. Raises `PluginError`
    for a registry of another kind."""
    space = context.adapters
    if space is not None and not isinstance(space, AdapterSpace):
        raise PluginError(
            f"ModelContext.adapters is a {type(space).__name__}: the blocks of dovetail.nn take an AdapterSpace"
        )
    return space if space is None or space.is_open else None


@contextmanager
def without_adapters(context: ModelContext) -> Iterator[None]:
    """Layers that are made meanwhile take no adapters."""
    space = adapter_space(context)
    if space is None:
        yield
        return
    space.is_open = False
    try:
        yield
    finally:
        space.is_open = True


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return f"the adapter does not fit this model: {'; '.join(problems[:_LISTED])}{more}"
