"""Block-sparse attention: every query reads local, strided and sink blocks of keys only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dovetail.attention_backends.block_sparse.cpu import CPUKernels
from dovetail.attention_backends.block_sparse.pattern import NO_PATTERN, BlockSparseOptions
from dovetail.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
    RotatesAndWrites,
)
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment

if TYPE_CHECKING:
    from dovetail.attention_backends.block_sparse.gpu import GPUKernels

_SMALLEST_GPU_BLOCK = 16


class BlockSparseBackend(AttentionBackend):
    """Attention as models with block-sparse layers were trained with (Phi-3-small, section 2.1; vLLM's blocksparse).

    Blocks outside of the pattern are not read, so time falls with the share of blocks that is left. Torch on CPUs, the
    kernels of `paged_triton` on GPUs.
    """

    contract = (1, 0)
    preference: ClassVar[int] = -10
    Options = BlockSparseOptions
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    )

    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        """The pattern, and on GPUs what the Triton kernels need."""
        reasons = []
        if options.local_blocks is None:
            reasons.append(NO_PATTERN)
        if options.sparse_block_size % need.block_size:
            reasons.append(
                f"{cls.__name__} needs a sparse_block_size that is a multiple of cache.block_size, {need.block_size}, "
                f"not {options.sparse_block_size}."
            )
        if need.device_type == "cuda":
            from dovetail.attention_backends.paged_triton.backend import against_shapes
            from dovetail.attention_backends.paged_triton.machine import against_machine

            reasons += against_shapes(cls.__name__, need) + against_machine(cls.__name__, need, environment)
            size = options.sparse_block_size
            if size < _SMALLEST_GPU_BLOCK or size & (size - 1):
                reasons.append(f"{cls.__name__} needs a power of two from 16 as sparse_block_size on GPUs, not {size}.")
        return reasons

    def __new__(cls, options: BlockSparseOptions, setup: AttentionSetup) -> BlockSparseBackend:
        """On GPUs one that rotates as well."""
        on_gpu = cls is BlockSparseBackend and torch.device(setup.device).type != "cpu"
        return super().__new__(RotatingBlockSparse if on_gpu else cls)

    def __init__(self, options: BlockSparseOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        if options.sparse_block_size % setup.block_size:
            raise ConfigError(
                f"block_sparse needs a sparse_block_size that is a multiple of cache.block_size, {setup.block_size}, "
                f"not {options.sparse_block_size}."
            )
        if setup.spec.dtype not in (self.capabilities.kv_dtypes or ()):
            raise ConfigError(
                f"block_sparse has no {setup.spec.dtype}; set cache.dtype to one of "
                f"{', '.join(sorted(self.capabilities.kv_dtypes or ()))}."
            )
        self._kernels: CPUKernels | GPUKernels = self._create_kernels(options, setup)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, num_kv_heads, 2 (key, value), block_size * head_size]."""
        spec = self.setup.spec
        return (num_blocks, spec.num_kv_heads, 2, self.setup.block_size * spec.head_size)

    def plan(self, batch: AttentionBatch) -> None:
        """Lists the blocks that the step reads."""
        self._kernels.plan(batch)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new tokens, then attends to the listed blocks."""
        return self._kernels.forward(layer, query, key, value, kv_cache)

    def _create_kernels(self, options: BlockSparseOptions, setup: AttentionSetup) -> CPUKernels | GPUKernels:
        return CPUKernels(options, setup)


class RotatingBlockSparse(BlockSparseBackend, RotatesAndWrites):
    """On GPUs, whose launch that writes the pages turns as well."""

    _kernels: GPUKernels

    def rotate_and_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """`forward`, with the rotation in the launch that writes the pages."""
        return self._kernels.rotate_and_forward(layer, query, key, value, cos, sin, kv_cache)

    def _create_kernels(self, options: BlockSparseOptions, setup: AttentionSetup) -> GPUKernels:
        from dovetail.attention_backends.block_sparse.gpu import GPUKernels

        return GPUKernels(options, setup)
