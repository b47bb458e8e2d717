"""Operator set: the small operators between a model's linear layers, fused where that saves passes over memory.

The building blocks (`dovetail.nn`) call them, so a model family gets a faster set without a change. Rows are
independent: a row's result bits must not depend on the number of rows, nor on its index among them. An argument that is
"given up" may be overwritten: the result may be in its memory, and the caller does not read it afterwards. All other
arguments stay unchanged. Tensors are on one device. Rows are [T, ...] with T >= 0; unless said otherwise they may be
strided views.

Each optional operator is a class of its own, which a set derives from as well: `DrawsTokens`, `MultipliesGroups`,
`AcceptsChains`, `AddsLowRank`, `AddsNarrowLowRank`. The host asks by `isinstance`, and uses torch where a set has none.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.needs import RUNS_ON, SERVES_DTYPES, among, compared
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OperatorsCapabilities:
    """What a set can do. It serves all its operators or none."""

    device_types: frozenset[str] | None = frozenset()
    """Devices that the set runs on, as torch names them ("cpu", "cuda"); None: any."""
    dtypes: frozenset[str] | None = frozenset()
    """dtypes of activations; None: any."""
    graph_capture: bool = True
    """The operators of a forward pass (`DrawsTokens` and `AcceptsChains` are none) can be captured in a graph: they
    launch the same operations for every input of the same shape, and neither wait for the device nor read its memory.
    False: some do, and steps run eagerly. So they do with a set that declares contract 1.0, which had no way to say so;
    torch's own operators aside."""


@dataclass(frozen=True)
class OperatorsNeed:
    """What a model asks of a set; the argument of `check`."""

    device_type: str = field(metadata=compared("device_types", among, RUNS_ON))
    dtype: str = field(metadata=compared("dtypes", among, SERVES_DTYPES))
    """dtype of activations, in torch's spelling."""


class Operators(Plugin):
    """One set of operators. A worker creates one and shares it among all layers; it keeps no state between calls.

    Results may differ from exact ones by the order of a float32 sum, and by the roundings that each operator names for
    narrower dtypes.
    """

    capabilities: ClassVar[OperatorsCapabilities] = OperatorsCapabilities()

    def __init__(self, options: PluginOptions):
        self.options = options

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

        x is [T, size] or [T, H, size]; weight is [size], contiguous, in x's dtype or in float32. Computed in float32
        (float64 for float64) and rounded to x's dtype once. Returns a new contiguous tensor of x's shape.
        """

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(residual + x), residual + x), the sum rounded to the dtype before it is normed.

        x and residual are [T, size], do not overlap, and are both given up.
        """

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, with silu(a) = a / (1 + exp(-a)) rounded to the dtype before it is multiplied.

        gate_up is [T, 2 n]: gate, then up. Returns a new contiguous [T, n].
        """

    @abstractmethod
    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates the first r elements of each head by the angles of its token, and returns all heads.

        heads is [T, H, head_size], a view of which no two elements share memory (queries and keys inside fused rows),
        and is given up. cos and sin are [T, 1, r] in its dtype, r even and at most head_size. With h = r / 2, and for
        i < h: y[i] = x[i] * cos[i] + x[i + h] * sin[i] and y[i + h] = x[i + h] * cos[i + h] + x[i] * sin[i + h] (the
        sign of the usual rotation is in sin); products and sum are each rounded to the dtype.
        """

    def take_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """table[ids]: rows of a contiguous [N, ...] for int64 ids [T] in 0 .. N - 1, as a new [T, ...];
        without override torch's indexing."""
        return table[ids]


class DrawsTokens(Operators):
    """A set that draws tokens. For other sets the host draws with torch."""

    @abstractmethod
    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """One token per row after temperature, min_p, top_k and top_p in this order.

        logits is [n, vocab_size] of any float type, -inf where nothing can be drawn. With w = exp((x - max x) /
        temperature): min_p (float32 [n]) keeps w >= min_p; top_k (int64 [n], at least 1) keeps the k highest; top_p
        (float64 [n] in (0, 1]) the fewest of the highest that hold that share of what is left; what ties with the last
        one kept is kept as well. temperature is float32 [n] above 0. The token is the first in order of its id at which
        the cumulative weight exceeds uniforms (float64 [n] in [0, 1)) times the total. Returns int64 [n], never a token
        that was not kept; for rows that hold NaN, or nothing but -inf, any token id. Must not synchronise with the
        device.
        """


class MultipliesGroups(Operators):
    """A set that multiplies the rows of several groups at once, each group with its own matrix: the experts of a
    mixture. For other sets the host multiplies group by group, and waits for the device to know the groups."""

    @abstractmethod
    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Multiplies rows starts[e] .. starts[e + 1] - 1 of x by weight[e] transposed.

        x is [T, in_features], sorted by group; weight [E, out_features, in_features] in its dtype, contiguous; starts
        int32 [E + 1] on the device, starts[0] == 0, starts[E] == T. Returns [T, out_features], summed in float32. Must
        not synchronise with the device.
        """


class AcceptsChains(Operators):
    """A set that verifies chains of draft tokens at once. For other sets acceptance rules go token by token."""

    @abstractmethod
    def accept_chains(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        accept_uniforms: torch.Tensor,
        recover_uniforms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verifies R chains of draft tokens by rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, Algorithm
        1).

        Chain r has nodes starts[r] .. starts[r + 1] - 1, none or more; starts is int32 [R + 1] on the device, starts[0]
        == 0, starts[R] == N. Node i is token_ids[i] (int64 [N]), was drawn from draft[i], and is accepted if the nodes
        before it in its chain are and accept_uniforms[i] * draft[i, token] < target[i + r, token], in float64. draft is
        float32 [N, vocab_size]; target is float32 [N + R, vocab_size], one row more for each chain: the distributions
        before its first node and after each node. accept_uniforms is float64 [N] in [0, 1). One-dimensional arguments
        are contiguous.

        One token follows the accepted nodes. With i = starts[r] + their number, it is drawn from w = max(target[i + r]
        - draft[i], 0), rounded to float32, where node i is rejected; and from w = target[i + r] where the whole chain
        is accepted, or where rounding leaves the first w without any mass. It is the first token in order of its id at
        which the cumulative w, summed in float64, exceeds recover_uniforms[i + r] (float64 [N + R] in [0, 1)) times the
        total of w.

        Returns int64 [R], the number of accepted nodes of each chain, and int64 [R], the token that follows: never one
        with w = 0; for rows with NaN or only zeros, any token id. Must not synchronise with the device.
        """


class AddsLowRank(Operators):
    """A set that adds low-rank adapters (Hu et al. 2021, arXiv 2106.09685) to the outputs of linear layers, another one
    to each row. For other sets the host computes slot by slot, and waits for the device to know the slots."""

    @abstractmethod
    def add_low_rank(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        part_starts: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """y[t, o] += sum over r < ranks[s] of b[s, r, o] * h[r], with h[r] = sum over i of a[s, p, r, i] * x[t, i], s =
        slots[t], and p the part of the layer that column o belongs to. Rows with slot -1 keep their bits.

        y is [T, out_features], changed in place, and x [T, in_features]; the elements of a row are contiguous. The
        adapters of all slots are a [slots, parts, max_rank, in_features] and b [slots, max_rank, out_features] in their
        dtype, contiguous; rows of a and b from the rank on are zeros, which need not be read. part_starts is int32
        [parts + 1], the first column of each part and out_features; ranks int32 [slots], 0 for a slot that changes
        nothing; slots int32 [T], all three contiguous and on the device. The sums and h are float32 (float64 for
        float64), and y is rounded to its dtype once. Must not synchronise with the device.
        """


class AddsNarrowLowRank(AddsLowRank):
    """A set whose `add_low_rank` also takes a and b, both in one dtype, in bfloat16 or float16 where y and x are wider.
    They are as good as a and b in y's dtype: nothing is rounded to the narrower one. Other sets are given adapters in
    y's dtype only; the host computes with torch where they are narrower."""
