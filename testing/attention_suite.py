"""The conformance suite of attention backends. A third party's test is a subclass::

    from dovetail.testing import AttentionBackendSuite

    class TestMyBackend(AttentionBackendSuite):
        plugin = MyBackend

What the backend's capabilities do not declare is skipped, with the name of the missing capability; what they declare
must hold. The oracle is a loop over (query, key) pairs in float64, see `dovetail.testing.attention_cases`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import (
    AttendsBothWays,
    AttendsLatents,
    AttentionBackend,
    AttentionCapabilities,
    AttentionNeed,
    MovesSlots,
    RotatesAndWrites,
)
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.nn.operators import torch_operators
from dovetail.testing.attention_cases import AttentionCase, CaseShape, as_cached, keys_as_cached, random_case
from dovetail.testing.both_ways_cases import random_both_ways_case
from dovetail.testing.latent_cases import random_latent_case
from dovetail.testing.suite import PluginSuite

DTYPES = ("float64", "float32", "float16", "bfloat16")
FEATURES = (
    *("plain", "sliding_window", "soft_cap", "alibi", "trees", "sliding_window+trees", "alibi+trees", "sinks"),
    *("chunked", "chunked+trees", "chunked+alibi", "latents", "latents+trees"),
)
BOTH_PAGES = pytest.mark.parametrize("feature", ["plain", "latents"])
"""For pages of keys and values, and for those of latent vectors."""


@dataclass(frozen=True)
class Tolerance:
    """How far a backend may be from the oracle: abs(error) <= absolute + relative * abs(expected)."""

    absolute: float
    relative: float
    reason: str


DEFAULT_TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-6, 1e-6, "parts of the softmax may be taken in float32"),
    "float32": Tolerance(5e-6, 5e-6, "float32 sums over up to some hundred keys in another order"),
    "float16": Tolerance(2e-3, 2e-3, "probabilities and outputs are rounded to 11 bits"),
    "bfloat16": Tolerance(2e-2, 2e-2, "probabilities and outputs are rounded to 8 bits"),
}


class AttentionBackendSuite(PluginSuite):
    """Tests of every attention backend. A plugin author sets `plugin`, and other attributes where they
    differ."""

    kind: ClassVar[str] = "attention_backend"
    plugin: ClassVar[type[AttentionBackend]]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    tolerances: ClassVar[Mapping[str, Tolerance]] = DEFAULT_TOLERANCES
    """By dtype. Where a backend needs larger tolerances than the defaults, its `reason` says why."""
    num_cases: ClassVar[int] = 6
    """Random cases per dtype and feature."""
    latent_sizes: ClassVar[Sequence[tuple[int, int]]] = ((16, 8), (32, 8), (64, 16))
    """(latent_size, rotary_size) of cases with latent vectors."""

    # --- hooks and helpers ---------------------------------------------------------------------------------

    def create(self, case: AttentionCase) -> AttentionBackend:
        """Returns a backend for the case, made as the host makes it."""
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), case.setup)

    def environment(self) -> Environment:
        """The machine that `check` gets."""
        return Environment(device_type=self.device.split(":")[0], num_cpus=2, memory_bytes=2**34)

    def need(self, **changes: Any) -> AttentionNeed:
        """A need that the declared capabilities cover, but for `changes`."""
        can = self.capabilities
        plain = AttentionNeed(
            device_type=self.device.split(":")[0],
            dtype=self.main_dtype,
            block_size=16 * can.block_size_multiple,
            head_sizes=frozenset({64} if can.head_sizes is None else {min(can.head_sizes)}),
        )
        return replace(plain, **changes)

    @property
    def capabilities(self) -> AttentionCapabilities:
        return self.plugin.capabilities

    @property
    def main_dtype(self) -> str:
        """The most exact dtype that the backend serves, float32 if it serves it."""
        return next(
            dtype for dtype in ("float32", "float16", "bfloat16", "float64") if dtype in self.capabilities.dtypes
        )

    def case(self, seed: int, dtype: str | None = None, feature: str = "plain", **changes: Any) -> AttentionCase:
        """A random case within the declared capabilities."""
        can, asked = self.capabilities, feature.split("+")
        heads = sorted(can.head_sizes) if can.head_sizes is not None else [8, 16, 24, 64]
        sizes = [size for size in (1, 8, 16, 32) if size % can.block_size_multiple == 0] or [can.block_size_multiple]
        shape = CaseShape(
            dtype=dtype or self.main_dtype,
            device=self.device,
            head_size=heads[seed % len(heads)],
            block_size=sizes[seed // 2 % len(sizes)],
            has_window="sliding_window" in asked,
            has_soft_cap="soft_cap" in asked,
            has_alibi="alibi" in asked,
            has_trees="trees" in asked,
            has_sinks="sinks" in asked,
            has_chunks="chunked" in asked,
        )
        if "bidirectional" in asked:
            return random_both_ways_case(seed, replace(shape, **changes))
        if "latents" in asked:
            latent_size, rotary_size = self.latent_sizes[seed % len(self.latent_sizes)]
            return random_latent_case(seed, replace(shape, **changes), latent_size, rotary_size)
        return random_case(seed, replace(shape, **changes))

    def assert_close(self, actual: torch.Tensor, case: AttentionCase) -> None:
        """Compares with the oracle, within the tolerance of the case's dtype."""
        tolerance = self.tolerances[case.setup.dtype]
        torch.testing.assert_close(
            actual.to("cpu", torch.float64), case.expected(), atol=tolerance.absolute, rtol=tolerance.relative
        )

    def kv_dtypes(self, feature: str) -> list[str]:
        """The declared dtypes of pages; those of latent vectors are never quantized."""
        declared = sorted(self.capabilities.kv_dtypes or {self.main_dtype})
        return [dtype for dtype in declared if feature != "latents" or DTYPE_BYTES[dtype] > 1]

    def require(self, *names: str, **values: str | int) -> None:
        """Skips where the backend does not declare one of these; "plain" is none."""
        super().require(*(name for name in names if name != "plain"), **values)

    def rotate_and_run(self, case: AttentionCase, rotary_size: int) -> tuple[torch.Tensor, AttentionCase]:
        """The step through `rotate_and_forward`, and the case whose queries and keys are rotated already."""
        backend = self.create(case)
        if not isinstance(backend, RotatesAndWrites):
            pytest.skip(f"{self.plugin.__name__} is no RotatesAndWrites on {self.device}")
        query, key, value = case.inputs()
        random = torch.rand(len(query), 2, 1, rotary_size, generator=torch.Generator().manual_seed(rotary_size))
        # As rotary tables hand them over: side by side.
        cos, sin = (2 * random - 1).to(query.device, query.dtype).unbind(1)
        operators = torch_operators()
        rotated = case.with_inputs(operators.rotate(query, cos, sin), operators.rotate(key, cos, sin))
        kv_cache = case.filled_cache(backend)
        backend.plan(case.batch())
        fused = torch.cat((query, key, value), dim=1)
        queries, keys, values = torch.split(fused, [query.shape[1], key.shape[1], value.shape[1]], dim=1)
        output = backend.rotate_and_forward(case.layer, queries, keys, values, cos, sin, kv_cache)
        assert torch.equal(values, value), "values are not given up"
        return output, rotated

    # --- attention -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_the_oracle(self, dtype: str, feature: str) -> None:
        """Prefill, chunk, decode and verify rows in one batch, over shuffled and shared pages."""
        self.require(dtypes=dtype)
        self.require(*feature.split("+"))
        for seed in range(self.num_cases):
            case = self.case(seed, dtype, feature)
            output = case.run_from_scratch(self.create(case))
            assert output.dtype == getattr(torch, dtype), "the output has the query's dtype"
            self.assert_close(output, case)

    @BOTH_PAGES
    def test_pages_of_every_declared_dtype(self, feature: str) -> None:
        """What is attended to is what the pages hold: keys and values rounded to their dtype."""
        self.require(feature)
        if self.capabilities.kv_dtypes is None:
            pytest.skip(f"{self.plugin.__name__} does not declare kv_dtypes")
        for kv_dtype in self.kv_dtypes(feature):
            for seed in range(self.num_cases):
                case = self.case(seed, feature=feature)
                rounded = tuple(
                    replace(
                        request, keys=keys_as_cached(request.keys, kv_dtype), values=as_cached(request.values, kv_dtype)
                    )
                    for request in case.requests
                )
                setup = replace(case.setup, spec=replace(case.setup.spec, dtype=kv_dtype))
                output = replace(case, setup=setup)
                self.assert_close(output.run_from_scratch(self.create(output)), replace(case, requests=rounded))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rotates_as_operators_do(self, dtype: str) -> None:
        """Queries and keys inside the rows of a fused projection, turned as a whole and in part."""
        self.require(dtypes=dtype)
        for seed in range(self.num_cases):
            case = self.case(seed, dtype, max_requests=2, max_cached=30, max_query=10)
            size = case.layer.head_size
            self.assert_close(*self.rotate_and_run(case, (size, size // 4 * 2 or 2)[seed % 2]))

    def test_rotates_into_pages_of_every_declared_dtype(self) -> None:
        """Keys are turned in the queries' dtype, and then rounded to that of the pages."""
        for kv_dtype in sorted(self.capabilities.kv_dtypes or {self.main_dtype}):
            case = self.case(1, max_requests=2, max_cached=30, max_query=10)
            case = replace(case, setup=replace(case.setup, spec=replace(case.setup.spec, dtype=kv_dtype)))
            output, rotated = self.rotate_and_run(case, case.layer.head_size)
            rounded = tuple(
                replace(
                    request, keys=keys_as_cached(request.keys, kv_dtype), values=as_cached(request.values, kv_dtype)
                )
                for request in rotated.requests
            )
            self.assert_close(output, replace(rotated, requests=rounded))

    @BOTH_PAGES
    def test_long_prompts(self, feature: str) -> None:
        """Hundreds of query tokens, whole and after cached ones, with a decode row."""
        self.require(feature)
        for seed, lengths in enumerate(((310, 0), (290, 270), (1, 150))[: max(2, min(3, self.num_cases))]):
            case = self.case(seed, feature=feature, lengths=(lengths, (1, 40)))
            self.assert_close(case.run_from_scratch(self.create(case)), case)

    def test_long_prompts_by_chunks(self) -> None:
        """Prompts of several chunks, each whole and behind cached tokens, and rows that begin a chunk."""
        self.require("chunked")
        for seed, lengths in enumerate(((310, 0), (290, 270))):
            case = self.case(seed, feature="chunked", lengths=(lengths, (1, 40), (1, 64), (20, 64)))
            layers = tuple(replace(layer, chunk=64) for layer in case.setup.layers)
            spec = replace(case.setup.spec, window=64)
            case = replace(case, setup=replace(case.setup, layers=layers, spec=spec))
            self.assert_close(case.run_from_scratch(self.create(case)), case)

    @BOTH_PAGES
    def test_inputs_are_not_changed(self, feature: str) -> None:
        self.require(feature)
        case = self.case(0, feature=feature)
        backend = self.create(case)
        kv_cache = case.filled_cache(backend)
        backend.plan(case.batch())
        inputs = case.inputs()
        copies = [tensor.clone() for tensor in inputs]
        case.forward(backend, *inputs, kv_cache)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))

    @BOTH_PAGES
    def test_inputs_may_be_slices_of_one_projection(self, feature: str) -> None:
        """Query, key and value as they come out of a fused projection: rows that are not contiguous."""
        self.require(feature)
        case = self.case(1, feature=feature)
        backend = self.create(case)
        kv_cache = case.filled_cache(backend)
        backend.plan(case.batch())
        query, key, value = case.inputs()
        fused = torch.cat((query, key, value), dim=1)
        first, second = query.shape[1], query.shape[1] + key.shape[1]
        output = case.forward(backend, fused[:, :first], fused[:, first:second], fused[:, second:], kv_cache)
        self.assert_close(output, case)

    # --- steps ---------------------------------------------------------------------------------------------

    @BOTH_PAGES
    def test_the_plan_copies_what_it_needs(self, feature: str) -> None:
        """The host overwrites its arrays after `plan`."""
        self.require(feature)
        case = self.case(2, feature=feature)
        backend = self.create(case)
        kv_cache = case.filled_cache(backend)
        batch = case.batch()
        backend.plan(batch)
        for array in (batch.query_start, batch.seq_lens, batch.block_table, batch.slot_mapping):
            array.fill(-1)
        self.assert_close(case.forward(backend, *case.inputs(), kv_cache), case)

    @BOTH_PAGES
    def test_nothing_leaks_from_one_step_to_the_next(self, feature: str) -> None:
        """A large step, a small one and the large one again, on one backend object."""
        self.require(feature)
        large = max((self.case(seed, feature=feature) for seed in range(8)), key=lambda case: len(case.inputs()[0]))
        small = replace(large, requests=large.requests[:1])
        backend = self.create(large)
        kv_cache = large.make_cache(backend)
        for case in (large, small, large):
            case.write_past(backend, kv_cache)
            self.assert_close(case.run(backend, kv_cache), case)

    @BOTH_PAGES
    def test_one_plan_serves_all_layers(self, feature: str) -> None:
        """`forward` of one layer leaves the plan as it was, and heeds that layer's scale, whichever comes first."""
        self.require(feature)
        plain = self.case(3, feature=feature)
        first = plain.layer
        layers = tuple(
            replace(first, layer_id=first.layer_id + index, scale=first.scale * factor)
            for index, factor in enumerate((1.0, 2.0, 0.5))
        )
        setup = replace(plain.setup, layers=layers)
        cases = [replace(plain, setup=setup, layer_index=index) for index in range(3)]
        for order in ((0, 1, 2), (2, 0, 1)):
            backend = self.create(cases[0])
            caches = {index: cases[index].filled_cache(backend) for index in order}
            backend.plan(plain.batch())
            for index in order:
                self.assert_close(cases[index].forward(backend, *plain.inputs(), caches[index]), cases[index])

    @BOTH_PAGES
    def test_batch_invariance(self, feature: str) -> None:
        """The bits of a request's rows stay when the other requests leave, and when its prompt comes in chunks."""
        self.require(feature, "batch_invariant")
        for seed in range(self.num_cases):
            case = self.case(seed, feature=feature)
            window, latents = case.layer.window is not None, feature == "latents"
            if self.check(self.need(batch_invariant=True, sliding_window=window, latents=latents)):
                continue
            case = replace(case, setup=replace(case.setup, batch_invariant=True))
            together = case.run_from_scratch(self.create(case))
            start = 0
            for request in case.requests:
                # Alone, no other request has filled the pages that it shared.
                alone = replace(request, num_shared=0)
                for skipped in (0, request.query_len // 2):
                    part = replace(case, requests=(replace(alone, query=request.query[skipped:]),))
                    rows = together[start + skipped : start + request.query_len]
                    assert torch.equal(part.run_from_scratch(self.create(part)), rows)
                start += request.query_len

    # --- pages ---------------------------------------------------------------------------------------------

    @BOTH_PAGES
    def test_a_page_takes_the_specified_bytes(self, feature: str) -> None:
        self.require(feature)
        kv_dtypes = self.kv_dtypes(feature)
        for seed in range(8):
            case = self.case(seed, feature=feature)
            spec = replace(case.setup.spec, dtype=kv_dtypes[seed % len(kv_dtypes)])
            case = replace(case, setup=replace(case.setup, spec=spec))
            shape = self.create(case).kv_cache_shape(7)
            page_bytes = case.setup.spec.page_bytes(case.setup.block_size)
            itemsize = getattr(torch, case.setup.spec.dtype).itemsize
            assert shape[0] == 7
            assert math.prod(shape) * itemsize == 7 * page_bytes

    @BOTH_PAGES
    def test_pages_may_lie_apart(self, feature: str) -> None:
        """The stride of dimension 0 is larger than a page where layers with larger pages share the storage."""
        self.require(feature)
        for seed in range(min(4, self.num_cases)):
            case = self.case(seed, feature=feature)
            self.assert_close(case.run_from_scratch(self.create(case), padding=8 * (seed + 1)), case)

    @BOTH_PAGES
    def test_a_page_can_be_moved(self, feature: str) -> None:
        """Copying dimension 0 moves all that a page holds, as swapping and copy-on-write do."""
        self.require(feature)
        case = self.case(4, feature=feature)
        backend = self.create(case)
        kv_cache = case.filled_cache(backend)
        size = case.num_blocks
        moved = replace(
            case,
            num_blocks=2 * size,
            requests=tuple(
                replace(request, block_ids=tuple(2 * size - block for block in request.block_ids))
                for request in case.requests
            ),
        )
        other_cache = moved.make_cache(backend)
        other_cache.fill_(torch.nan)
        for block in range(1, size):
            other_cache[2 * size - block] = kv_cache[block].to("cpu").to(other_cache.device)
        self.assert_close(moved.run(backend, other_cache), moved)

    @BOTH_PAGES
    def test_slots_can_be_moved(self, feature: str) -> None:
        """After a tree was verified, the accepted tokens move; sources are read before targets are written."""
        self.require(feature, "trees")
        for padding in (0, 8):
            case = self.case(5, feature=feature, lengths=((5, 37),))
            request = case.requests[0]
            backend = self.create(case)
            assert isinstance(backend, MovesSlots), "a backend that declares trees is a MovesSlots"
            kv_cache = case.filled_cache(backend, padding)
            block_size = case.setup.block_size
            slots = torch.tensor(
                [request.block_ids[j // block_size] * block_size + j % block_size for j in range(request.num_cached)],
                dtype=torch.int64,
                device=self.device,
            )
            # A rotation: each token moves one slot on, so each target is the next one's source.
            backend.move_slots(kv_cache, slots, slots.roll(-1))
            keys, values = (
                torch.cat((x[: request.num_cached].roll(1, 0), x[request.num_cached :]))
                for x in (request.keys, request.values)
            )
            rotated = replace(case, requests=(replace(request, keys=keys, values=values),))
            self.assert_close(rotated.run(backend, kv_cache), rotated)

    # --- selection -----------------------------------------------------------------------------------------

    def check(self, need: AttentionNeed) -> list[str]:
        options = self.plugin.Options.model_validate(dict(self.options))
        return reasons_against(self.plugin, need, options, self.environment())

    def test_check_accepts_what_is_declared(self) -> None:
        can = self.capabilities
        for dtype in can.dtypes:
            assert self.check(self.need(dtype=dtype)) == []
            for kv_dtype in can.kv_dtypes or ():
                assert self.check(self.need(dtype=dtype, kv_dtype=kv_dtype)) == []
        features = ("sliding_window", "soft_cap", "alibi", "trees", "sinks", "chunked")
        declared = {feature: True for feature in features if vars(can)[feature]}
        assert self.check(self.need(**declared)) == []
        if can.batch_invariant:
            assert self.check(self.need(batch_invariant=True)) == []
        if can.bidirectional:
            assert self.check(self.need(bidirectional=True)) == []
        for latent_size, rotary_size in self.latent_sizes if can.latents else ():
            sizes = frozenset({latent_size + rotary_size})
            assert self.check(self.need(latents=True, head_sizes=sizes, trees=can.trees)) == []

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_queries_see_their_whole_sequence(self, dtype: str) -> None:
        """In layers that are not causal: sequences of equal and of different lengths, without pages."""
        self.require("bidirectional", dtypes=dtype)
        assert issubclass(self.plugin, AttendsBothWays), "a backend that declares bidirectional is an AttendsBothWays"
        for seed in range(self.num_cases):
            case = self.case(seed, dtype, "bidirectional")
            output = case.run_from_scratch(self.create(case))
            assert output.dtype == getattr(torch, dtype), "the output has the query's dtype"
            self.assert_close(output, case)

    def test_declared_latents_are_attended_to(self) -> None:
        """The host calls `latent_forward`."""
        self.require("latents")
        assert issubclass(self.plugin, AttendsLatents), "a backend that declares latents is an AttendsLatents"


__all__ = ["DEFAULT_TOLERANCES", "AttentionBackendSuite", "Tolerance"]
