"""Quantization method: how a linear layer's weights are held and multiplied.

Weights arrive in full precision, to be rounded, or packed, as a quantized checkpoint stores them. A method that names a
format in `QuantizationCapabilities.packed_formats` is handed its blocks as they are and computes with the weights that
these stand for: `auto` chooses among such methods, since running them changes no weight.

What a kernel can do beyond products is a class of its own, which it derives from as well: `LooksUpRows`, `KeepsPacked`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.needs import RUNS_ON, among, compared, flag, informs
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch

    from dovetail.contracts.weights import PackedTensor


@dataclass(frozen=True, kw_only=True)
class QuantizationCapabilities:
    """What a method can do. The host asks these, never the method's name."""

    device_types: frozenset[str] | None = frozenset()
    """Devices that its kernels multiply on, as torch names them: "cpu", "cuda"; None: any."""
    dtypes: frozenset[str] | None = frozenset()
    """dtypes of activations, in torch's spelling ("float32", "bfloat16", ...); None: any."""
    packed_formats: frozenset[str] = frozenset()
    """Formats (`PackedTensor.format`) whose blocks the kernels take as they are, without rounding anew. Empty: the
    kernels get full-precision weights only, and the config has to name the method, except `for_drafters`."""
    embeddings: bool = False
    """`describe` and `create_linear` may be asked about token embeddings too. Their kernels are `LooksUpRows`, and are
    shared with the output layer where the model ties the two. Otherwise embeddings stay in full precision."""
    batch_invariant: bool = False
    """The kernels can multiply so that a row's result bits depend on nothing but the row: not on how many rows there
    are, nor on its index among them."""
    reloads_rows: bool = False
    """Loaded kernels take some rows and keep the others. Otherwise `load` is given all rows of a layer or none: new
    weights for one part of a fused layer alone are refused."""
    for_drafters: bool = False
    """`auto` may round the weights of a drafter's own layers with it: guesses hardly change, and what is generated not
    at all."""


@dataclass(frozen=True)
class QuantizationNeed:
    """What the config asks of a method; the argument of `check`."""

    device_type: str = field(metadata=compared("device_types", among, RUNS_ON))
    dtype: str = field(
        metadata=compared("dtypes", among, "{name} multiplies with {has} activations, not {asked}; set model.dtype.")
    )
    """dtype of activations."""
    packed_formats: frozenset[str] = field(
        default=frozenset(),
        metadata=informs("a method is handed numbers in place of formats that it does not hold; `check` may refuse"),
    )
    """Formats of the checkpoint's packed tensors ("Q4_1", "Q6_K", ...); empty where it stores numbers."""
    batch_invariant: bool = field(
        default=False,
        metadata=compared(
            "batch_invariant",
            flag,
            "{name}'s results depend on the rows of the same batch, which reproducibility: strict does not allow: "
            "choose another method, or leave reproducibility at default.",
        ),
    )
    """Whether a row's result bits must not depend on the rows of the same batch (`reproducibility: strict`)."""


@dataclass(frozen=True)
class LinearShape:
    """One linear layer on one rank, fused parts together."""

    name: str
    """Dotted path in the model, "model.layers.0.mlp.gate_up_proj"."""
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True, kw_only=True)
class LayerSupport:
    """What a method makes of one layer: kernel or full precision, and what the kernel takes."""

    is_served: bool = False
    """Whether there is a kernel for it; else it stays in full precision."""
    why_not: str | None = None
    """Why a layer is not served, as the end of a sentence ("input sizes that are no multiple of 32"): a warning, and a
    line of `dovetail explain`. None: it is meant to be so, as for layers that an option names."""
    bytes_per_weight: float = 0.0
    """Bytes that a weight takes which comes as a number, scales included."""
    packed_bytes_per_weight: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a weight takes which comes packed, by format: one entry for each of `packed_formats`."""
    reads_once: bool = False
    """A product of one row reads the weights once, as they are held, and writes none out on the way: then fewer bytes
    are more tokens per second, and `dovetail doctor` may advise the method."""

    def least_bytes_per_weight(self, packed_formats: Collection[str]) -> float:
        """Bytes that a weight takes at least, of a checkpoint with these packed formats."""
        held = [self.packed_bytes_per_weight.get(name, self.bytes_per_weight) for name in packed_formats]
        return min(held, default=self.bytes_per_weight)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is to be said of a method as a whole, once the model's layers are known."""

    refusals: tuple[str, ...] = ()
    """Why it cannot be used, `check` aside: an option that names a layer which the model does not have."""
    warnings: tuple[str, ...] = ()
    """What a user who chose it should know though it works, each as the rest of a sentence that begins with its name
    ("is slower than no quantization on CPUs: ..."): a warning at start, and in `dovetail explain`."""


class LinearKernel(ABC):
    """The weights of one linear layer in the method's own form. Created on the worker's device."""

    @abstractmethod
    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Takes the weights of output rows `rows` ([rows, in_features]).

        A round of calls ends with `finish`. The first round has one call per fused part, until every row was given.
        Later ones give all rows again, or some, of methods with `reloads_rows`, and may cut them in other places. The
        new weights then take the memory of the old ones: what captured graphs, recorded calls and native plans know of
        addresses stays valid, and results have the bits of a fresh kernel that is loaded with the same weights. A
        round that fails half-way is followed by one of all rows. Nothing is multiplied during a round.

        `weight` is a `PackedTensor` only of the `packed_formats` of the kernel's method, and a tensor of numbers
        otherwise. Parts that are fused may come in several formats, and some packed and some not. It must not be
        written to: it may be a view of a memory map, which keeping it keeps open.

        Raises `ModelError` in a later round for rows in a form that needs other memory than they have.
        """

    def finish(self) -> None:
        """The round is over: pack, and drop what is no longer needed."""
        return None

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features], in x's dtype."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """What the kernel holds, so that it can be moved away and back while nothing runs, or given up until a round of
        `load` brings all of it again (`Worker.call` "sleep", levels 1 and 2): all weights, and nothing else. From
        the first `finish` on they are the same objects. By default every tensor among its attributes, so a
        kernel that keeps some in a list or a dict overrides it."""
        import torch

        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]


class LooksUpRows(LinearKernel):
    """A kernel that can serve as a table of token embeddings."""

    @abstractmethod
    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [N] row numbers -> those rows of the weight, [N, in_features] in `dtype`."""


class KeepsPacked(LinearKernel):
    """A kernel whose weights can be kept on disk, so that later starts need not pack them."""

    @abstractmethod
    def layout(self) -> str:
        """Names the form in which the weights are held here, with a version and whatever of the machine it depends on:
        weights that were packed in one process serve another with the same layout."""

    @abstractmethod
    def packed(self) -> Mapping[str, torch.Tensor]:
        """After `finish`: all that the kernel made of its weights, by names of its choice."""

    @abstractmethod
    def restore(self, packed: Mapping[str, torch.Tensor]) -> None:
        """In place of the first round of `load` and `finish`, on a fresh kernel of the same shape: takes what `packed`
        gave in an earlier process. The tensors are views of a file's private memory map, which may be written to; copy
        what has to lie elsewhere."""


class QuantizationMethod(Plugin):
    """Creates the kernel of each linear layer, or leaves a layer to plain torch."""

    capabilities: ClassVar[QuantizationCapabilities] = QuantizationCapabilities()

    def __init__(self, options: PluginOptions, need: QuantizationNeed):
        self.options = options
        self.need = need

    @abstractmethod
    def describe(self, shape: LinearShape) -> LayerSupport:
        """Whether there is a kernel for a layer, and what it takes: for choices and estimates before a weight is read.
        Takes no memory."""

    @abstractmethod
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """The kernel for one layer that is served, without weights. On the device "meta" it takes no memory."""

    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        """What speaks against the method, or should be known of it, for a model with these layers: all that `describe`
        will be asked about. Without override nothing."""
        return Findings()
