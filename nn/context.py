"""The context with which a model family builds its module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.model import Communicator
from dovetail.contracts.operators import Operators
from dovetail.contracts.quantization import LinearKernel, LinearShape, LooksUpRows, QuantizationMethod
from dovetail.nn.adapters import AdapterSpace
from dovetail.nn.communicator import SingleProcess
from dovetail.nn.kernels import plain_kernel
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.operators import torch_operators


@dataclass
class BuildContext:
    """The `ModelContext` of one module on one rank."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """Longest sequence that will be computed; sizes the tables of position embeddings."""
    kv_dtype: str
    """dtype of cached keys and values, in torch's spelling."""
    communicator: Communicator = field(default_factory=SingleProcess)
    quantization: QuantizationMethod | None = None
    batch_invariant: bool = False
    """Whether a row's result bits must not depend on the other rows of the batch; linear layers ensure it."""
    operators: Operators = field(default_factory=torch_operators)
    """The operators that compute norms, gated activations and rotations."""
    keeper: KernelKeeper | None = None
    """Keeps the quantization method's kernels on disk; None: they are packed at every start."""
    layers: range | None = None
    """Decoder layers of this stage, as the checkpoint numbers them; None: all of the model's."""
    is_first_stage: bool = True
    """Whether the module has the embedding."""
    is_last_stage: bool = True
    """Whether the module has the final norm and the output layer."""
    attention_layers: list[AttentionModule] = field(default_factory=list, init=False)
    """Every attention layer of the module, in the order of creation, which is the order of `layer_id`."""
    adapters: AdapterSpace | None = None
    """Where linear layers register for low-rank adapters; None: the module gets none."""

    @property
    def tp_rank(self) -> int:
        """This process's rank in the tensor-parallel group."""
        return self.communicator.rank

    @property
    def tp_size(self) -> int:
        """Number of ranks that share each layer."""
        return self.communicator.size

    def held_layers(self, num_layers: int) -> range:
        """Returns which of the model's `num_layers` decoder layers this module holds. Raises `ModelError` where the
        stages were cut for more layers."""
        if self.layers is None:
            return range(num_layers)
        if self.layers.stop > num_layers:
            raise ModelError(
                f"a stage is to hold the layers {self.layers.start} .. {self.layers.stop - 1}, and the model has "
                f"{num_layers}; cut the stages anew"
            )
        return self.layers

    def divide(self, total: int, what: str) -> int:
        """Returns `total` / `tp_size`. Raises `ModelError` where the division leaves a remainder."""
        if total % self.tp_size:
            raise ModelError(
                f"{what} is {total}, which does not divide by tensor_parallel={self.tp_size}; "
                f"choose a tensor_parallel that divides it"
            )
        return total // self.tp_size

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns an uninitialised tensor on the context's device, in its dtype unless `dtype` is given."""
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def create_kernel(self, shape: LinearShape) -> LinearKernel:
        """Returns the quantization method's kernel for a linear layer, or a torch kernel where the method has none."""
        kernel = self._create_quantized(shape)
        return kernel if kernel is not None else self.create_plain_kernel(shape)

    def create_embedding_kernel(self, shape: LinearShape) -> LooksUpRows | None:
        """Returns the quantization method's kernel for a table of token embeddings; None: the table stays a plain
        tensor. Raises `PluginError` for a kernel that looks up no rows."""
        if self.quantization is None or not self.quantization.capabilities.embeddings:
            return None
        kernel = self._create_quantized(shape)
        if kernel is not None and not isinstance(kernel, LooksUpRows):
            raise PluginError(
                f"{type(self.quantization).__name__} declares embeddings, and its kernel for {shape.name} is no "
                "LooksUpRows: derive it from that class, or leave embeddings out of the capabilities"
            )
        return kernel

    def _create_quantized(self, shape: LinearShape) -> LinearKernel | None:
        method = self.quantization
        if method is None or not method.describe(shape).is_served:
            return None
        kernel = method.create_linear(shape, self.device)
        return kernel if self.keeper is None else self.keeper.wrap(shape, kernel)

    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel:
        """Returns a kernel in full precision, whatever the quantization method."""
        weight = self.empty(shape.out_features, shape.in_features)
        return plain_kernel(weight, batch_invariant=self.batch_invariant)
