"""Quantization method: how a linear layer's weights are held and multiplied.

Weights arrive in full precision, to be rounded, or packed, as a quantized checkpoint stores them. A method that names a
format in `QuantizationCapabilities.packed_formats` gets its blocks unchanged and computes with the weights that they
encode: `auto` chooses among such methods, since they change no weight.

What a kernel can do beyond products is a class of its own, which the kernel derives from as well: `LooksUpRows`,
`KeepsPacked`.
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
    """Devices that the kernels run on, as torch names them ("cpu", "cuda"); None: any."""
    dtypes: frozenset[str] | None = frozenset()
    """dtypes of activations, in torch's spelling ("float32", "bfloat16", ...); None: any."""
    packed_formats: frozenset[str] = frozenset()
    """Formats (`PackedTensor.format`) whose blocks the kernels take unchanged, without rounding again. Empty: the
    kernels get full-precision weights only, and the config has to name the method, except `for_drafters`."""
    embeddings: bool = False
    """`describe` and `create_linear` may be asked about token embeddings too. Their kernels are `LooksUpRows`, and are
    shared with the output layer where the model ties the two. Otherwise embeddings stay in full precision."""
    batch_invariant: bool = False
    """The kernels can multiply so that a row's result bits depend on nothing but the row: not on how many rows there
    are, nor on its index among them."""
    reloads_rows: bool = False
    """Loaded kernels can replace some rows and keep the others. Otherwise `load` gets all rows of a layer or none: the
    host refuses new weights for one part of a fused layer alone."""
    graph_capture: bool = False
    """Products can be captured in a graph: `LinearKernel.apply` launches the same operations for every input of as many
    rows, and neither waits for the device nor reads its memory. Otherwise steps run eagerly."""
    for_drafters: bool = False
    """`auto` may round the weights of a drafter's own layers with the method: drafts hardly change, outputs do not
    change."""


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
    """How a method serves one layer: by a kernel, of which size, or not at all."""

    is_served: bool = False
    """Whether the method has a kernel for the layer; else the layer stays in full precision."""
    why_not: str | None = None
    """Why a layer is not served, as the end of a sentence ("input sizes that are no multiple of 32"): a warning, and a
    line of `dovetail explain`. None: it is intended, as for layers that an option names."""
    bytes_per_weight: float = 0.0
    """Bytes per weight that is loaded as a number, scales included."""
    packed_bytes_per_weight: Mapping[str, float] = field(default_factory=dict)
    """Bytes per weight that is loaded packed, by format: one entry for each of `packed_formats`."""
    reads_once: bool = False
    """A product of one row reads the held weights once and writes none out in between: then fewer bytes mean more
    tokens per second, and `dovetail doctor` may advise the method."""

    def least_bytes_per_weight(self, packed_formats: Collection[str]) -> float:
        """Least bytes per weight of a checkpoint with these packed formats."""
        held = [self.packed_bytes_per_weight.get(name, self.bytes_per_weight) for name in packed_formats]
        return min(held, default=self.bytes_per_weight)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a method reports about a model as a whole, once its layers are known."""

    refusals: tuple[str, ...] = ()
    """Why the method cannot be used, in addition to `check`: an option names a layer that the model does not have."""
    warnings: tuple[str, ...] = ()
    """What a user of the method should know, each as the rest of a sentence that begins with the method's name ("is
    slower than no quantization on CPUs: ..."): a warning at start, and in `dovetail explain`."""


class LinearKernel(ABC):
    """The weights of one linear layer in the method's own form. Created on the worker's device."""

    @abstractmethod
    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Loads the weights of output rows `rows` ([rows, in_features]).

        A round of calls ends with `finish`. The first round has one call per fused part, until every row was given.
        Later rounds give all rows again, or, for methods with `reloads_rows`, some; they may cut the rows elsewhere.
        The new weights then go into the memory of the old ones: addresses in captured graphs, recorded calls and native
        plans stay valid, and results have the bits of a fresh kernel with the same weights. After a round that failed
        half-way, the next one gives all rows. The kernel does not multiply during a round.

        `weight` is a `PackedTensor` only of the `packed_formats` of the kernel's method, and a tensor of numbers
        otherwise. Fused parts may come in several formats, some packed and some not. Do not write to `weight` or keep
        it: it may be a view of a memory map, which would stay open.

        Raises `ModelError` in a later round for rows whose form needs other memory than they have.
        """

    def finish(self) -> None:
        """Ends the round: packs the weights, and drops what is no longer needed."""
        return None

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies: x [T, in_features] -> [T, out_features], in x's dtype."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Returns all tensors with the kernel's weights, and no others. While no step runs, the host moves them away
        and back, or frees them until a round of `load` gives all weights again (`Worker.call` "sleep", levels 1 and 2).
        From the first `finish` on they are the same objects. The default returns every tensor among the kernel's
        attributes, so a kernel that keeps some in a list or a dict overrides it."""
        import torch

        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]


class LooksUpRows(LinearKernel):
    """A kernel that can serve as a table of token embeddings."""

    @abstractmethod
    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns rows of the weight: int64 [N] row numbers -> [N, in_features] in `dtype`."""


class KeepsPacked(LinearKernel):
    """A kernel whose weights can be kept on disk, so that later starts need not pack them."""

    @abstractmethod
    def layout(self) -> str:
        """Returns a name of the form in which the weights are held, with a version and the properties of the machine on
        which it depends: weights that one process packed serve another with the same layout."""

    @abstractmethod
    def packed(self) -> Mapping[str, torch.Tensor]:
        """Returns, after `finish`, all tensors that the kernel made of its weights, by names of its choice."""

    @abstractmethod
    def restore(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Loads what `packed` returned in an earlier process into a fresh kernel of the same shape, in place of the
        first round of `load` and `finish`. The tensors are views of a file's private memory map and may be written to;
        copy those that need other memory."""


class QuantizationMethod(Plugin):
    """Creates the kernel of each linear layer, or leaves a layer to plain torch."""

    capabilities: ClassVar[QuantizationCapabilities] = QuantizationCapabilities()

    def __init__(self, options: PluginOptions, need: QuantizationNeed):
        self.options = options
        self.need = need

    @abstractmethod
    def describe(self, shape: LinearShape) -> LayerSupport:
        """Returns whether the method has a kernel for a layer, and its size: for choices and estimates before a weight
        is read. Allocates no memory."""

    @abstractmethod
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Returns the kernel for one layer that is served, without weights. On the device "meta" it takes no memory."""

    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        """Returns reasons against the method, and caveats, for a model with these layers: all layers that `describe` is
        asked about. The default has none."""
        return Findings()
