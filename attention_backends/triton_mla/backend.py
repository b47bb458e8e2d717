"""Multi-head latent attention on GPUs over pages of latent vectors, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dovetail.attention_backends.paged_triton import machine
from dovetail.attention_backends.paged_triton.passes import Passes
from dovetail.contracts.attention import (
    AttendsLatents,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
    MovesSlots,
)
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kv import LatentSpec
from dovetail.contracts.plugin import Environment, PluginOptions

if TYPE_CHECKING:
    from dovetail.attention_backends.triton_mla.launch import LatentLauncher

MAX_LATENT = 512
MAX_ROTARY = 64
MAX_HEADS = 128


class TritonMLABackend(MovesSlots, AttendsLatents):
    """`paged_triton` for layers that keep latent vectors: all query heads read the same vector, so a tile has as many
    heads as its rows hold, and loads each vector once for scores and values. Steps are planned as there.

    A page is [block_size, latent_size + rotary_size]. `latent_forward` can be captured in a graph.
    """

    contract = (1, 1)
    preference: ClassVar[int] = 10
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        trees=True,
        batch_invariant=True,
        graph_capture=True,
        latents=True,
    )

    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        """Whether there are latent vectors, of sizes that fit, Triton, and a GPU that the kernels compile for."""
        name = cls.__name__
        if not need.latents:
            return [f"{name} serves multi-head latent attention only; choose paged_triton, or auto."]
        if need.batch_invariant and need.trees:
            return [f"{name} has no batch-invariant mode for trees."]
        reasons = []
        largest = max(need.head_sizes, default=0)
        if largest > MAX_LATENT + MAX_ROTARY:
            reasons.append(f"{name} serves up to {MAX_LATENT} + {MAX_ROTARY} elements a vector; these have {largest}.")
        return reasons + machine.against_machine(name, need, environment)

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        latents = latents_of(setup)
        num_processors, arch = machine.device_facts(torch.device(setup.device))
        self._latent_size = latents.latent_size
        self._launcher = self._create_launcher(setup, latents, arch)
        self._passes = Passes(setup, self._launcher, num_processors)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, latent_size + rotary_size]."""
        return (num_blocks, self.setup.block_size, self.setup.spec.head_size)

    def plan(self, batch: AttentionBatch) -> None:
        """Cuts the step into tiles and items, once for each kind of layer, and sends them to the device."""
        self._passes.plan(batch)

    def latent_forward(
        self, layer: AttentionLayer, query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Writes the new vectors, then launches what was planned."""
        query = self._launcher.write(query, latent, kv_cache, self._passes.tokens)
        output = query.new_empty(*query.shape[:2], self._latent_size)
        self._passes.attend(layer, query, kv_cache, output)
        return output

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Raises `PluginError`: the host calls it for layers with keys and values alone, which `check` refuses."""
        raise PluginError("triton_mla has no pages of keys and values: call latent_forward, or choose paged_triton.")

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the vectors of single tokens; all sources are read first."""
        block_size = self.setup.block_size
        kv_cache[target // block_size, target % block_size] = kv_cache[source // block_size, source % block_size]

    def _create_launcher(self, setup: AttentionSetup, latents: LatentSpec, arch: int) -> LatentLauncher:
        from dovetail.attention_backends.triton_mla.launch import LatentLauncher

        return LatentLauncher(setup, latents, arch)


def latents_of(setup: AttentionSetup) -> LatentSpec:
    """What the layers keep. Raises `ConfigError` for what `check` could not see."""
    latents = setup.spec
    if not isinstance(latents, LatentSpec):
        raise ConfigError("triton_mla serves multi-head latent attention only; set attention to paged_triton, or auto.")
    if latents.dtype != setup.dtype or latents.dtype not in TritonMLABackend.capabilities.dtypes:
        raise ConfigError(
            f"triton_mla keeps latent vectors in the model's dtype, {setup.dtype}, not in {latents.dtype}; set "
            f"cache.dtype."
        )
    if latents.latent_size > MAX_LATENT or latents.rotary_size > MAX_ROTARY:
        raise ConfigError(
            f"triton_mla serves up to {MAX_LATENT} + {MAX_ROTARY} elements a vector; these have "
            f"{latents.latent_size} + {latents.rotary_size}."
        )
    num_heads = max((layer.num_heads for layer in setup.layers), default=1)
    if num_heads > MAX_HEADS:
        raise ConfigError(f"triton_mla serves up to {MAX_HEADS} query heads; the model has {num_heads}.")
    if any(layer.scale <= 0 for layer in setup.layers):
        raise ConfigError("triton_mla needs a positive scale of the scores in all layers.")
    return latents
