"""Quantization method: how a linear layer's weights are held and multiplied.

Weights arrive in full precision, to be rounded, or packed, as a quantized checkpoint stores them. A method that names a
packed format in `holds` is handed its blocks as they are and computes with the weights that these stand for: `auto`
chooses among such methods, since running them changes no weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.needs import RUNS_ON, among, compared, flag, informs
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch

    from dovetail.contracts.weights import PackedTensor


@dataclass(frozen=True, kw_only=True)
class QuantizationCapabilities:
    """What a method can do."""

    device_types: frozenset[str] | None = frozenset()
    """Devices that its kernels multiply on; None: any."""
    dtypes: frozenset[str] | None = frozenset()
    """dtypes of activations; None: any."""
    batch_invariant: bool = False
    """The kernels can multiply so that a row's result bits depend on nothing but the row: not on how many rows there
    are, nor on its index among them."""


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

        `weight` is a `PackedTensor` only of the formats that the kernel's method `holds`, and a tensor of numbers
        otherwise. Parts that are fused may come in several formats, and some packed and some not. It must not be
        written to: it may be a view of a memory map, which keeping it keeps open.

        Raises `ModelError` in a later round for rows in a form that needs other memory than they have.
        """

    def finish(self) -> None:
        """The round is over: pack, and drop what is no longer needed."""
        return None

    def packed(self) -> Mapping[str, torch.Tensor]:
        """After `finish`: all that the kernel made of its weights, by names of its choice. Asked only of kernels whose
        method has a `layout`."""
        raise TypeError(f"{type(self).__name__} cannot be kept")

    def restore(self, packed: Mapping[str, torch.Tensor]) -> None:
        """In place of `load` and `finish`, on a fresh kernel of the same shape: takes what `packed` gave in an earlier
        process. The tensors are views of a file's memory map; copy what has to lie elsewhere."""
        raise TypeError(f"{type(self).__name__} cannot be restored")

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

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [N] row numbers -> those rows of the weight, [N, in_features] in `dtype`. Asked only of kernels whose
        method says `embeddings`: the table of a token embedding."""
        raise TypeError(f"{type(self).__name__} looks up no rows")


class QuantizationMethod(Plugin):
    """Creates the kernel of each linear layer, or leaves a layer to plain torch."""

    capabilities: ClassVar[QuantizationCapabilities] = QuantizationCapabilities()

    holds: ClassVar[frozenset[str]] = frozenset()
    """Packed formats (`PackedTensor.format`) whose blocks the kernels take as they are, without rounding anew. Empty:
    the kernels get full-precision weights only, and the config has to name the method."""

    embeddings: ClassVar[bool] = False
    """Whether `create_linear` may be asked for token embeddings too, whose kernels then `lookup` rows, and are shared
    with the output layer where the model ties the two. Otherwise embeddings stay in full precision."""

    reloads_rows: ClassVar[bool] = False
    """Whether loaded kernels take some rows and keep the others. Otherwise `load` is given all rows of a layer or none:
    new weights for one part of a fused layer alone are refused."""

    for_drafters: ClassVar[bool] = False
    """Whether `auto` may round the weights of a drafter's own layers with it: guesses hardly change, and what is
    generated not at all."""

    def __init__(self, options: PluginOptions, need: QuantizationNeed):
        self.options = options
        self.need = need

    @abstractmethod
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel | None:
        """The kernel for one layer; None: this layer stays in full precision.

        Asked while the configuration is resolved as well, of a model without weights, with the device "meta" where the
        run's is no CPU: which layers are served has to follow from `shape`.
        """

    def why_not(self, shape: LinearShape) -> str | None:
        """Why `create_linear` leaves a layer in full precision, as the end of a sentence ("input sizes that are no
        multiple of 32"); asked only of layers that it does leave. None (without override): it is meant to be so, as
        for layers that an option names."""
        return None

    def against_layers(self, shapes: Sequence[LinearShape]) -> list[str]:
        """What speaks against the method once the model's layers are known, `check` aside: an option that names a
        layer which the model does not have. `shapes`: all that `create_linear` will be asked about."""
        return []

    def caveat(self) -> str | None:
        """What a user who chose the method should know of it on this device though it works, as the rest of a sentence
        that begins with its name ("is slower than no quantization on CPUs: ..."): a warning at start, and in `dovetail
        explain`. None (without override): nothing."""
        return None

    def reads_only_held(self) -> bool:
        """Whether a product of one row reads the weights once, as they are held, and writes none out on the way: then
        fewer bytes are more tokens per second, and `dovetail doctor` may advise the method. False (without
        override): not known."""
        return False

    def layout(self) -> str | None:
        """Names the form in which kernels hold their weights here, with a version and whatever of the machine it
        depends on: weights packed in one process serve another with the same layout. None (without override): the
        kernels' weights are not kept on disk."""
        return None

    @abstractmethod
    def bytes_per_weight(self) -> float:
        """Bytes that one quantized weight takes, scales included: for memory estimates."""

    def layer_bytes_per_weight(self, shape: LinearShape) -> float:
        """`bytes_per_weight` of one layer that has a kernel and comes in full precision. Without override
        that of all."""
        return self.bytes_per_weight()

    def held_bytes_per_weight(self, packed_format: str) -> float | None:
        """Bytes that a weight takes which comes packed in one of the formats that the method `holds`. None
        (without override): as many as in the checkpoint."""
        return None
