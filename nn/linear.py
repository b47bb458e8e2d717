"""Linear layers with fusion, sharding and quantization.

The name of a layer, and of each part of a fused one, is its dotted path in the checkpoint. "Column" layers give each
rank some of the output features, "row" layers some of the input features (Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelContext
from dovetail.contracts.quantization import LinearShape
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.adapters import adapter_space
from dovetail.nn.collectives import CallsCollectives, Collective
from dovetail.nn.kernels import is_plain, share_of, unpacked
from dovetail.nn.loading import WeightHolder


@dataclass(frozen=True)
class LinearPart:
    """One linear layer of the checkpoint inside a, possibly fused, layer on one rank."""

    source: str
    """The part's dotted name in the checkpoint."""
    shape: tuple[int, int]
    """The part's full (out_features, in_features)."""
    take: tuple[slice, slice]
    """Rows and columns that this rank keeps."""
    rows: slice
    """Rows of the fused weight that hold them."""


class Linear(WeightHolder):
    """Computes y = x W^T + b, with the weights of its parts stacked; subclasses define the parts."""

    takes_packed = True

    def __init__(
        self, context: ModelContext, name: str, parts: Sequence[LinearPart], bias: bool, quantize: bool = True
    ):
        super().__init__()
        out_features = parts[-1].rows.stop
        columns = parts[0].take[1]
        shape = LinearShape(name, columns.stop - columns.start, out_features, bias)
        self.kernel = context.create_kernel(shape) if quantize else context.create_plain_kernel(shape)
        self.bias = context.empty(out_features) if bias else None
        self._takes_some_rows = is_plain(self.kernel) or (
            context.quantization is not None and context.quantization.capabilities.reloads_rows
        )
        self._weights = {f"{part.source}.weight": part for part in parts}
        self._given: set[str] = set()
        """Weights of the round of loading that is not finished yet."""
        self._biases = {f"{part.source}.bias": part for part in parts} if bias else {}
        space = adapter_space(context)
        self.adapters = None if space is None else space.register(context, parts)
        """The layer's share of the adapters; None: it takes none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features], both of this rank."""
        y = self.kernel.apply(x, self.bias)
        return y if self.adapters is None else self.adapters.add(y, x)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight of each part, and its bias where the layer has one."""
        weights: dict[str, tuple[int, ...]] = {name: part.shape for name, part in self._weights.items()}
        return weights | {name: (part.shape[0],) for name, part in self._biases.items()}

    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None:
        """Keeps this rank's rows and columns."""
        if name in self._weights:
            part = self._weights[name]
            self.kernel.load(part.rows, share_of(self.kernel, tensor, part.take))
            self._given.add(name)
        elif self.bias is not None:
            part = self._biases[name]
            self.bias[part.rows].copy_(unpacked(tensor)[part.take[0]])

    def finish(self) -> None:
        """Lets the kernel pack its weights, if any were given. Raises `ModelError` if only some rows were given and the
        kernel takes all or none."""
        given, self._given = self._given, set()
        missing = sorted(self._weights.keys() - given)
        if given and missing and not self._takes_some_rows:
            raise ModelError(
                f"{', '.join(sorted(given))} cannot be loaded without {', '.join(missing)}: they are one layer here,"
                " whose quantization method loads all of its rows or none; give them together"
            )
        if given:
            self.kernel.finish()


class ReplicatedLinear(Linear):
    """A layer that every rank holds whole, never quantized: for routers and gates, which are small and sensitive."""

    def __init__(self, context: ModelContext, name: str, in_features: int, out_features: int, bias: bool = False):
        everything = (slice(0, out_features), slice(0, in_features))
        part = LinearPart(name, (out_features, in_features), everything, everything[0])
        super().__init__(context, name, [part], bias, quantize=False)


class MergedColumnLinear(Linear):
    """Several layers over one input as one multiplication, each sharded by output features.

    `parts` maps the checkpoint name of each layer to its full out_features; their outputs are concatenated.
    """

    def __init__(
        self, context: ModelContext, name: str, in_features: int, parts: Mapping[str, int], bias: bool = False
    ):
        slices: list[LinearPart] = []
        start = 0
        for source, out_features in parts.items():
            share = context.divide(out_features, f"the output size of {source}")
            take = slice(context.tp_rank * share, (context.tp_rank + 1) * share)
            rows = slice(start, start + share)
            slices.append(LinearPart(source, (out_features, in_features), (take, slice(0, in_features)), rows))
            start += share
        super().__init__(context, name, slices, bias)


class ColumnLinear(MergedColumnLinear):
    """One layer, sharded by output features."""

    def __init__(self, context: ModelContext, name: str, in_features: int, out_features: int, bias: bool = False):
        super().__init__(context, name, in_features, {name: out_features}, bias)


class RowLinear(Linear, CallsCollectives):
    """One layer, sharded by input features; the ranks' partial results are summed unless `reduce` is False."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = False,
        reduce: bool = True,
    ):
        share = context.divide(in_features, f"the input size of {name}")
        columns = slice(context.tp_rank * share, (context.tp_rank + 1) * share)
        rows = slice(0, out_features)
        super().__init__(context, name, [LinearPart(name, (out_features, in_features), (rows, columns), rows)], bias)
        self._communicator = context.communicator
        self._sums = reduce and context.tp_size > 1
        self._out_features = out_features
        # Summed over the ranks a bias must count once, so only one of them may add it.
        self._own_bias = self.bias if context.tp_rank == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features of this rank] -> [T, out_features]."""
        y = self.kernel.apply(x, self._own_bias)
        if self.adapters is not None:
            y = self.adapters.add(y, x)
        return self._communicator.all_reduce(y) if self._sums else y

    def collectives(self) -> tuple[Collective, ...]:
        """The sum, unless the layer leaves it out."""
        return (Collective("all_reduce", self._out_features),) if self._sums else ()


class QKVLinear(Linear):
    """Queries, keys and values as one multiplication, sharded by heads.

    The output row is [num_heads | num_kv_heads | num_kv_heads] x head_size of this rank. With fewer key heads than
    ranks, neighbouring ranks hold copies of the same head. `names` are the checkpoint names of q, k and v.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        names: tuple[str, str, str],
        bias: bool = False,
    ):
        heads = context.divide(num_heads, "the number of attention heads")
        kv_heads, first_kv_head = _kv_share(context, num_heads, num_kv_heads)
        parts: list[LinearPart] = []
        start = 0
        for source, total, first, count in (
            (names[0], num_heads, context.tp_rank * heads, heads),
            (names[1], num_kv_heads, first_kv_head, kv_heads),
            (names[2], num_kv_heads, first_kv_head, kv_heads),
        ):
            take = slice(first * head_size, (first + count) * head_size)
            rows = slice(start, start + count * head_size)
            shape = (total * head_size, hidden_size)
            parts.append(LinearPart(source, shape, (take, slice(0, hidden_size)), rows))
            start = rows.stop
        super().__init__(context, name, parts, bias)
        self.num_heads = heads
        """Query heads of this rank."""
        self.num_kv_heads = kv_heads
        """Key-value heads of this rank."""
        self.head_size = head_size


def _kv_share(context: ModelContext, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """(number, first) of this rank's key-value heads."""
    size, rank = context.tp_size, context.tp_rank
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    if size <= num_kv_heads:
        count = context.divide(num_kv_heads, "the number of key-value heads")
        return count, rank * count
    if size % num_kv_heads:
        raise ModelError(
            f"{num_kv_heads} key-value heads cannot be copied evenly to tensor_parallel={size} ranks; "
            f"choose a tensor_parallel that divides {num_kv_heads} or is a multiple of it"
        )
    return 1, rank // (size // num_kv_heads)
