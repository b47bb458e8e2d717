"""What the suite of attention backends finds: each a change in a backend that passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
    Reach,
    RotatesAndWrites,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.nn.operators import torch_operators
from dovetail.testing.attention_suite import AttentionBackendSuite
from dovetail.testing.faults import Fault, check_fault, run_test


def reading_layers(**changes: Any) -> type[ReferenceBackend]:
    """The backend, which takes these values for those of every layer."""

    class Misread(ReferenceBackend):
        def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
            return super().forward(replace(layer, **changes), *tensors)

        def plan(self, batch: AttentionBatch) -> None:
            self._reaches = {replace(layer, **changes).reach for layer in self.setup.layers}
            super().plan(batch)

    return Misread


class SlidesOverChunks(ReferenceBackend):
    """Takes chunks for sliding windows."""

    def plan(self, batch: AttentionBatch) -> None:
        self._reaches = {Reach(window=layer.chunk) for layer in self.setup.layers}
        super().plan(batch)

    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        return super().forward(replace(layer, window=layer.chunk, chunk=None), *tensors)


class FirstScale(ReferenceBackend):
    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        return super().forward(replace(layer, scale=self.setup.layers[0].scale), *tensors)


class Restarts(ReferenceBackend):
    """Counts the query tokens of a chunk from 0 again behind 256 of them."""

    def _visible(self, positions: Any, num_cached: int, row: int, tree: Any, reach: Any, first: int) -> Any:
        return super()._visible(positions, num_cached, row % 256, tree, reach, first)


class IgnoresTrees(ReferenceBackend):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, tree_masks={}))


class KeepsViews(ReferenceBackend):
    """Looks at the batch when a layer is computed."""

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        super().plan(self._batch)
        return super().forward(layer, *tensors)


class PlansForOneLayer(ReferenceBackend):
    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        output = super().forward(layer, *tensors)
        self._requests = {window: [] for window in self._requests}
        return output


class GrowsOnly(ReferenceBackend):
    """Keeps the slots of a larger step."""

    def plan(self, batch: AttentionBatch) -> None:
        before = self._write_pages, self._write_offsets
        super().plan(batch)
        if len(before[0]) > len(self._write_pages):
            self._write_pages = torch.cat((self._write_pages, before[0][len(self._write_pages) :]))
            self._write_offsets = torch.cat((self._write_offsets, before[1][len(self._write_offsets) :]))

    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        missing = len(self._write_pages) - len(key)
        padded = [torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in (key, value)]
        pages, offsets = self._write_pages, self._write_offsets
        kv_cache[pages, 0, offsets], kv_cache[pages, 1, offsets] = (x.to(kv_cache.dtype) for x in padded)
        self._write_pages, self._write_offsets = pages[: len(key)], offsets[: len(key)]
        return super().forward(layer, query, key, value, kv_cache)


class ScalesInPlace(ReferenceBackend):
    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        query *= layer.scale
        return super().forward(replace(layer, scale=1.0), query, key, value, kv_cache)


class WantsContiguousInputs(ReferenceBackend):
    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        return super().forward(layer, query, key, value.view(value.numel()).view(value.shape), kv_cache)


class WantsPagesSideBySide(ReferenceBackend):
    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        packed = kv_cache.as_strided(kv_cache.shape, torch.empty(kv_cache.shape, device="meta").stride())
        return super().forward(layer, query, key, value, packed)


class AnswersInFloat32(ReferenceBackend):
    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, *tensors).float()


class LargerPages(ReferenceBackend):
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        shape = super().kv_cache_shape(num_blocks)
        return (*shape[:-1], shape[-1] + 1)


class MovesOneByOne(ReferenceBackend):
    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        for one in range(len(source)):
            super().move_slots(kv_cache, source[one : one + 1], target[one : one + 1])


class RefusesTrees(ReferenceBackend):
    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        return [*super().check(need, options, environment), *(["no trees today"] if need.trees else [])]


class MixesRows(ReferenceBackend):
    """Declares batch invariance and adds what depends on the batch."""

    def forward(self, layer: AttentionLayer, query: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, query, *tensors) * (1 + 1e-6 * len(query))


class OneHeadForAll(ReferenceBackend):
    """Every query head reads the first key head."""

    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        key, value = (x[:, :1].expand_as(x) for x in (key, value))
        return super().forward(layer, query, key, value, kv_cache)


class ForgetsCachedTokens(ReferenceBackend):
    """Takes chunks for whole prompts."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, seq_lens=np.diff(batch.query_start).astype(np.int32)))


class Rotating(ReferenceBackend, RotatesAndWrites):
    """Passes as it is."""

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
        rotate = torch_operators().rotate
        return self.forward(layer, rotate(query, cos, sin), rotate(key, cos, sin), value, kv_cache)


class RotatesQueriesOnly(Rotating):
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
        return self.forward(layer, torch_operators().rotate(query, cos, sin), key, value, kv_cache)


class ClaimsTrees(AttentionBackend):
    """Declares them, serves them, and moves no slots."""

    capabilities = ReferenceBackend.capabilities

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        self.sound = ReferenceBackend(options, setup)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return self.sound.kv_cache_shape(num_blocks)

    def plan(self, batch: AttentionBatch) -> None:
        self.sound.plan(batch)

    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        return self.sound.forward(layer, *tensors)


class LatentFault(ReferenceBackend):
    """Serves keys and values as it should."""

    def latent_forward(self, layer: AttentionLayer, query: Any, latent: Any, kv_cache: Any) -> torch.Tensor:
        return super().latent_forward(layer, *self.changed(query, latent), kv_cache)

    def changed(self, query: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return query, latent


class IgnoresSharedKey(LatentFault):
    """Attends to the latent part alone."""

    def changed(self, query: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = query.clone()
        query[..., self.setup.spec.latent_size :] = 0  # type: ignore[attr-defined]
        return query, latent


class OneQueryForAll(LatentFault):
    def changed(self, query: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return query[:, :1].expand_as(query), latent


class ChangesLatents(LatentFault):
    def changed(self, query: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return query, latent.neg_()


class SharedKeyFirst(LatentFault):
    """The scores are right, and the shared key is a part of the value."""

    def changed(self, query: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotary_size = self.setup.spec.rotary_size  # type: ignore[attr-defined]
        return query.roll(rotary_size, -1), latent.roll(rotary_size, -1)


class ScalesByHeadSize(ReferenceBackend):
    """The size of a vector says nothing about the scale."""

    def latent_forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        return super().latent_forward(replace(layer, scale=layer.head_size**-0.5), *tensors)


class WholeVectors(ReferenceBackend):
    """Pages as large as those of keys and values."""

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        shape = super().kv_cache_shape(num_blocks)
        return shape if self.setup.latent is None else (*shape[:-1], 2 * shape[-1])


class MovesLatentsOneByOne(ReferenceBackend):
    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        for one in range(len(source)) if self.setup.latent is not None else ():
            super().move_slots(kv_cache, source[one : one + 1], target[one : one + 1])
        if self.setup.latent is None:
            super().move_slots(kv_cache, source, target)


class ClaimsLatents(ClaimsTrees):
    """Declares them, and has no `latent_forward`."""


ORACLE = "test_equals_the_oracle[float32-{}]"
FAULTS = [
    Fault("takes the first layer's scale for all", FirstScale, "test_one_plan_serves_all_layers"),
    Fault("counts query tokens from 0 again behind 256", Restarts, "test_long_prompts"),
    Fault("ignores the scale", reading_layers(scale=1.0), ORACLE.format("plain")),
    Fault("ignores windows", reading_layers(window=None), ORACLE.format("sliding_window")),
    Fault("ignores soft caps", reading_layers(soft_cap=None), ORACLE.format("soft_cap")),
    Fault("ignores slopes", reading_layers(alibi_slopes=None), ORACLE.format("alibi")),
    Fault("ignores sinks", reading_layers(sinks=None), ORACLE.format("sinks")),
    Fault("ignores chunks", reading_layers(chunk=None), ORACLE.format("chunked")),
    Fault("takes chunks for sliding windows", SlidesOverChunks, ORACLE.format("chunked")),
    Fault("ignores trees", IgnoresTrees, ORACLE.format("trees")),
    Fault("reads one key head for all", OneHeadForAll, ORACLE.format("plain")),
    Fault("forgets cached tokens", ForgetsCachedTokens, ORACLE.format("plain")),
    Fault("answers in float32", AnswersInFloat32, "test_equals_the_oracle[bfloat16-plain]"),
    Fault("keeps views of the batch", KeepsViews, "test_the_plan_copies_what_it_needs"),
    Fault("plans for one layer", PlansForOneLayer, "test_one_plan_serves_all_layers"),
    Fault("keeps slots of a larger step", GrowsOnly, "test_nothing_leaks_from_one_step_to_the_next"),
    Fault("scales its queries in place", ScalesInPlace, "test_inputs_are_not_changed"),
    Fault("wants contiguous inputs", WantsContiguousInputs, "test_inputs_may_be_slices_of_one_projection"),
    Fault("wants pages side by side", WantsPagesSideBySide, "test_pages_may_lie_apart"),
    Fault("has larger pages than it may", LargerPages, "test_a_page_takes_the_specified_bytes"),
    Fault("moves slots one by one", MovesOneByOne, "test_slots_can_be_moved"),
    Fault("declares trees and moves no slots", ClaimsTrees, "test_slots_can_be_moved"),
    Fault("rotates queries only", RotatesQueriesOnly, "test_rotates_as_operators_do[float32]"),
    Fault("ignores the shared key", IgnoresSharedKey, ORACLE.format("latents")),
    Fault("reads the query of one head for all", OneQueryForAll, ORACLE.format("latents")),
    Fault("takes the shared key for a part of the value", SharedKeyFirst, ORACLE.format("latents")),
    Fault("scales by the size of a latent vector", ScalesByHeadSize, ORACLE.format("latents")),
    Fault("changes latent vectors", ChangesLatents, "test_inputs_are_not_changed[latents]"),
    Fault("has larger pages of latents than it may", WholeVectors, "test_a_page_takes_the_specified_bytes[latents]"),
    Fault("moves slots of latents one by one", MovesLatentsOneByOne, "test_slots_can_be_moved[latents]"),
    Fault("ignores trees over latents", IgnoresTrees, ORACLE.format("latents+trees")),
    Fault("declares latents and attends to none", ClaimsLatents, "test_declared_latents_are_attended_to"),
    Fault("refuses what it declares", RefusesTrees, "test_check_accepts_what_is_declared"),
    Fault("declares batch invariance falsely", MixesRows, "test_batch_invariance"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_backend_that(fault: Fault) -> None:
    check_fault(fault, AttentionBackendSuite, plugin=fault.plugin, num_cases=3)


def test_a_sound_backend_that_rotates_passes() -> None:
    outcome = run_test(AttentionBackendSuite, "test_rotates_as_operators_do", plugin=Rotating, num_cases=3)
    assert outcome.passed
    assert not outcome.failed
