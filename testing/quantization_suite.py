"""The conformance suite of quantization methods. A third party's test is a subclass::

    from dovetail.testing import QuantizationSuite

    class TestMyMethod(QuantizationSuite):
        plugin = MyMethod
        tolerance = 0.02  # what rounding may cost

A method that `holds` packed formats sets `packed_formats` and makes such weights in `weight`
(`dovetail.testing.packed_blocks` has those of GGUF files). Dtypes that `check` refuses are skipped, with its reason.
The oracle multiplies in float64.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.contracts.quantization import (
    KeepsPacked,
    LayerSupport,
    LinearKernel,
    LinearShape,
    LooksUpRows,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.kernels import unpacked
from dovetail.nn.replay import record
from dovetail.testing.suite import PluginSuite
from dovetail.worker.machine.environment import detect_environment

DTYPES = ("float32", "float16", "bfloat16")
NUM_ROWS = (0, 1, 17)
"""Rows of activations: none, decoding, and more than kernels for few rows take."""

CUTS = ((0.0, 0.5), (0.4, 0.45), (0.3, 0.9), (0.0, 1.0))
"""Which rows of a part are loaded again."""

Weight = torch.Tensor | PackedTensor


class QuantizationSuite(PluginSuite):
    """Tests of every quantization method. A plugin author sets `plugin` and `tolerance`, and other attributes
    where they differ."""

    kind: ClassVar[str] = "quantization"
    plugin: ClassVar[type[QuantizationMethod]]
    tolerance: ClassVar[float]
    """How far a product may be from the exact one, as a fraction of the sum of its terms' magnitudes; the rounding of
    the result to the activations' dtype comes on top. What all weights are off by on average may be a quarter of it."""
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    packed_formats: ClassVar[frozenset[str]] = frozenset()
    """Formats of what `weight` makes; empty for numbers."""
    in_features: ClassVar[int] = 1024
    part_rows: ClassVar[Sequence[int]] = (16, 32, 80)
    """Output features of each fused part."""

    # --- hooks and helpers ---------------------------------------------------------------------------------

    def weight(self, rows: int, columns: int, seed: int) -> Weight:
        """The weights of one part, the same for the same seed."""
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))

    @pytest.fixture(params=DTYPES)
    def method(self, request: pytest.FixtureRequest) -> QuantizationMethod:
        """The method, made as the host makes it, for each dtype of activations that it serves here."""
        self.require(dtypes=request.param)
        if reasons := self.check(request.param):
            pytest.skip(f"{self.plugin.__name__}: {' '.join(reasons)}")
        return self.create(request.param)

    def create(self, dtype: str) -> QuantizationMethod:
        """A method for activations of `dtype`."""
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), self.need(dtype))

    def need(self, dtype: str, batch_invariant: bool = False) -> QuantizationNeed:
        """The need that a config makes."""
        return QuantizationNeed(self.device.split(":")[0], dtype, self.packed_formats, batch_invariant)

    def check(self, dtype: str) -> list[str]:
        """Returns the method's reasons against activations of `dtype` on this machine."""
        environment: Environment = detect_environment(self.device.split(":")[0])
        options = self.plugin.Options.model_validate(dict(self.options))
        return reasons_against(self.plugin, self.need(dtype), options, environment)

    @property
    def shape(self) -> LinearShape:
        """A layer of every part."""
        return LinearShape("model.layers.0.mlp.gate_up_proj", self.in_features, sum(self.part_rows), has_bias=True)

    def parts(self, seed: int = 0) -> list[tuple[slice, Weight]]:
        """Returns the weights of each part, and their rows."""
        made: list[tuple[slice, Weight]] = []
        start = 0
        for index, rows in enumerate(self.part_rows):
            made.append((slice(start, start + rows), self.weight(rows, self.in_features, 10 * seed + index)))
            start += rows
        return made

    def kernel(self, method: QuantizationMethod) -> LinearKernel:
        """A kernel without weights."""
        support = method.describe(self.shape)
        assert support.is_served, f"{self.shape} is left in full precision: choose in_features and part_rows"
        return method.create_linear(self.shape, torch.device(self.device))

    def loaded(self, kernel: LinearKernel, parts: Sequence[tuple[slice, Weight]]) -> LinearKernel:
        """The kernel with these weights."""
        for rows, weight in parts:
            kernel.load(rows, weight)
        kernel.finish()
        return kernel

    def random(self, *shape: int, method: QuantizationMethod, seed: int = 7) -> torch.Tensor:
        """Normal numbers in the activations' dtype."""
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, getattr(torch, method.need.dtype))

    # --- products ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
    @pytest.mark.parametrize("num_rows", NUM_ROWS)
    def test_products_are_within_tolerance(self, method: QuantizationMethod, num_rows: int, has_bias: bool) -> None:
        """In the activations' dtype, with every part at its rows; what is handed in stays as it is."""
        parts = self.parts()
        kernel = self.loaded(self.kernel(method), parts)
        x = self.random(num_rows, self.in_features, method=method)
        bias = self.random(self.shape.out_features, method=method, seed=8) if has_bias else None
        before = x.clone()
        y = kernel.apply(x, bias)
        weight = dense(parts).to(self.device)
        expected = x.double() @ weight.T + (0 if bias is None else bias.double())
        bound = self.tolerance * (x.double().abs() @ weight.abs().T)
        bound += 2 * torch.finfo(y.dtype).eps * expected.abs()
        assert (y.dtype, y.shape) == (x.dtype, expected.shape)
        assert torch.equal(x, before), "x is not given up"
        wrong = (y.double() - expected).abs() > bound
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} outputs are off by more than {self.tolerance}"

    def test_a_bias_is_added(self, method: QuantizationMethod) -> None:
        """Compared with the product without, so that it does not drown in what rounding may cost."""
        kernel = self.loaded(self.kernel(method), self.parts())
        for num_rows in NUM_ROWS[1:]:
            x = self.random(num_rows, self.in_features, method=method)
            bias = 100 * self.random(self.shape.out_features, method=method, seed=8)
            without, y = kernel.apply(x, None).double(), kernel.apply(x, bias).double()
            # Products in full precision may begin their sums, in float32, with the bias.
            eps = 2 * torch.finfo(x.dtype).eps + 64 * torch.finfo(torch.float32).eps
            bound = eps * (without.abs() + bias.double().abs())
            assert bool(((y - without - bias.double()).abs() <= bound).all())

    def test_rounding_has_no_direction(self, method: QuantizationMethod) -> None:
        """In sums of numbers of one sign the errors of single weights would add up, if they were cut instead of
        rounded, or all scaled by a little too much; what is left of them is less than a quarter of the tolerance."""
        parts = self.parts()
        kernel = self.loaded(self.kernel(method), parts)
        weight = dense(parts).to(self.device)
        dtype = getattr(torch, method.need.dtype)
        total = weight.abs().sum(1)
        bound = self.tolerance / 4 + torch.finfo(dtype).eps
        towards_zero = (kernel.apply(weight.sign().to(dtype), None).double().diagonal() - total) / total
        self._assert_small(float(towards_zero.mean()), bound, "grow (below 0: shrink)")
        ones = torch.ones(1, self.in_features, dtype=dtype, device=self.device)
        downwards = (kernel.apply(ones, None)[0].double() - weight.sum(1)) / total
        self._assert_small(float(downwards.mean()), bound, "are moved up (below 0: down)")

    def _assert_small(self, share: float, bound: float, what: str) -> None:
        assert abs(share) <= bound, (
            f"weights {what} by {share:.2%} of their size on average, and a quarter of the tolerance, {bound:.2%}, is "
            "allowed: round to the nearest. Where that is done, and the numbers to round to lie unevenly, as those of "
            "NF4 do, raise the tolerance"
        )

    def test_zeros_stay_zeros(self, method: QuantizationMethod) -> None:
        """A part of zeros, a row and a run of 32 in others: no NaN, and nothing beyond float32's own rounding."""
        parts = self.parts()
        if any(isinstance(weight, PackedTensor) for _, weight in parts):
            pytest.skip("packed weights come with their scales")
        for index, (_, weight) in enumerate(parts):
            assert isinstance(weight, torch.Tensor)
            weight[1] = 0
            weight[3, 32:64] = 0
            if index == 0:
                weight.zero_()
        kernel = self.loaded(self.kernel(method), parts)
        x = self.random(3, self.in_features, method=method)
        y = kernel.apply(x, None)
        assert bool(y.isfinite().all())
        zero = dense(parts).abs().sum(1) == 0
        limit = 1e-6 * x.abs().sum(1, keepdim=True)
        assert bool((y[:, zero].abs() <= limit).all()), "outputs of features whose weights are all zero"
        probe = torch.zeros_like(x)
        probe[:, 32:64] = x[:, 32:64]
        assert bool((kernel.apply(probe, None)[:, parts[1][0].start + 3].abs() <= limit[:, 0]).all())

    def test_rows_do_not_depend_on_the_batch(self, method: QuantizationMethod) -> None:
        """A row's bits do not depend on other rows, where the method declares it."""
        self.require("batch_invariant")
        strict = self.plugin(method.options, self.need(method.need.dtype, batch_invariant=True))
        kernel = self.loaded(self.kernel(strict), self.parts())
        x = self.random(33, self.in_features, method=method)
        together = kernel.apply(x, None)
        for rows in (slice(0, 1), slice(5, 9), slice(32, 33)):
            assert torch.equal(kernel.apply(x[rows], None), together[rows])

    # --- loading -------------------------------------------------------------------------------------------

    def test_parts_come_in_any_order(self, method: QuantizationMethod) -> None:
        """Weights are not written to, and the order changes no bit."""
        parts = self.parts()
        before = dense(parts)
        x = self.random(3, self.in_features, method=method)
        expected = self.loaded(self.kernel(method), parts).apply(x, None)
        assert torch.equal(self.loaded(self.kernel(method), parts[::-1]).apply(x, None), expected)
        assert torch.equal(dense(parts), before), "weights may be views of a memory map"

    def test_loading_again_keeps_the_memory(self, method: QuantizationMethod) -> None:
        """A kernel that multiplied already takes other weights: same addresses, the bits of a fresh kernel."""
        x = self.random(3, self.in_features, method=method)
        kernel = self.loaded(self.kernel(method), self.parts())
        first, places = kernel.apply(x, None), addresses(kernel)
        again = self.loaded(kernel, self.parts(seed=1)).apply(x, None)
        assert not torch.equal(again, first), "the old weights are still there"
        assert torch.equal(again, self.loaded(self.kernel(method), self.parts(seed=1)).apply(x, None))
        assert addresses(kernel) == places, "captured graphs and native plans hold the old addresses"

    @pytest.mark.parametrize("cut", CUTS, ids=str)
    def test_some_rows_are_loaded_again(self, method: QuantizationMethod, cut: tuple[float, float]) -> None:
        """Of each part those from one share of its rows to another, where the method declares it."""
        self.require("reloads_rows")
        x = self.random(3, self.in_features, method=method)
        kernel = self.loaded(self.kernel(method), self.parts())
        places = addresses(kernel)
        mixed: list[tuple[slice, Weight]] = []
        for (rows, old), (_, new) in zip(self.parts(), self.parts(seed=1), strict=True):
            start, stop = (round(share * (rows.stop - rows.start)) for share in cut)
            kernel.load(slice(rows.start + start, rows.start + stop), new[start:stop])
            mixed.append((rows, stacked([old[:start], new[start:stop], old[stop:]])))
        kernel.finish()
        assert torch.equal(kernel.apply(x, None), self.loaded(self.kernel(method), mixed).apply(x, None))
        assert addresses(kernel) == places

    def test_a_round_that_failed_half_way_is_followed_by_another(self, method: QuantizationMethod) -> None:
        """As where a checkpoint turns out to be cut off: nothing of the failed round is left."""
        x = self.random(3, self.in_features, method=method)
        kernel = self.loaded(self.kernel(method), self.parts())
        places = addresses(kernel)
        for rows, weight in self.parts(seed=2)[1:]:
            kernel.load(rows, weight)
        again = self.loaded(kernel, self.parts(seed=1)).apply(x, None)
        assert torch.equal(again, self.loaded(self.kernel(method), self.parts(seed=1)).apply(x, None))
        assert addresses(kernel) == places

    def test_a_round_owes_nothing_to_what_was_there(self, method: QuantizationMethod) -> None:
        """As for a worker that slept: the memory of `tensors` comes back with other content."""
        x = self.random(3, self.in_features, method=method)
        kernel = self.loaded(self.kernel(method), self.parts())
        expected = kernel.apply(x, None)
        for tensor in kernel.tensors():
            tensor.view(torch.uint8).fill_(0xA5)
        assert torch.equal(self.loaded(kernel, self.parts()).apply(x, None), expected)

    def test_recorded_products_see_new_weights(self, method: QuantizationMethod) -> None:
        """As a captured graph, or on CPUs as the recorded calls of native kernels, where there are any."""
        kernel = self.loaded(self.kernel(method), self.parts())
        recorded = repeated(lambda x: kernel.apply(x, None), self.random(3, self.in_features, method=method))
        if isinstance(recorded, str):
            pytest.skip(recorded)
        first = recorded().clone()
        self.loaded(kernel, self.parts(seed=1))
        fresh = self.loaded(self.kernel(method), self.parts(seed=1))
        again = recorded().clone()
        assert torch.equal(again, fresh.apply(self.random(3, self.in_features, method=method), None))
        assert not torch.equal(again, first)

    def test_kept_weights_are_restored(self, method: QuantizationMethod) -> None:
        """What `packed` gives makes the same kernel of another method's fresh one, and is not tied to the first."""
        kernel = self.kernel(method)
        if not isinstance(kernel, KeepsPacked):
            pytest.skip(f"{type(kernel).__name__} is no KeepsPacked: its weights are not kept")
        self.loaded(kernel, self.parts())
        kept = {name: tensor.cpu().clone() for name, tensor in kernel.packed().items()}
        fresh = self.kernel(self.create(method.need.dtype))
        assert isinstance(fresh, KeepsPacked)
        assert fresh.layout() == kernel.layout()
        fresh.restore(kept)
        x = self.random(3, self.in_features, method=method)
        assert torch.equal(fresh.apply(x, None), kernel.apply(x, None))
        assert {name: tensor.shape for name, tensor in fresh.packed().items()} == {
            name: tensor.shape for name, tensor in kept.items()
        }
        again, expected = (self.loaded(each, self.parts(seed=1)).apply(x, None) for each in (fresh, kernel))
        assert torch.equal(again, expected), "restored weights are loaded again like any others"

    def test_tensors_are_all_that_is_read(self, method: QuantizationMethod) -> None:
        """Without what `tensors` gives, nothing is left of the weights; with it again, everything is there. A byte of 0
        is a scale of 2 ** -127 where scales are powers of two (MXFP4)."""
        kernel = self.loaded(self.kernel(method), self.parts())
        x = self.random(3, self.in_features, method=method)
        expected = kernel.apply(x, None)
        tensors = list(kernel.tensors())
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        assert kernel.apply(x, None).float().abs().max() < 1e-30, "weights lie elsewhere than in tensors()"
        for tensor, content in zip(tensors, kept, strict=True):
            tensor.copy_(content)
        assert torch.equal(kernel.apply(x, None), expected)

    def test_weights_that_were_taken_in_are_let_go(self, method: QuantizationMethod) -> None:
        """They may be views of a memory map. What a kernel holds as it came must be among its tensors."""
        kernel = self.kernel(method)
        memory = []
        for rows, weight in self.parts():
            numbers = (weight.blocks if isinstance(weight, PackedTensor) else weight).numpy().copy()
            memory.append((weakref.ref(numbers), numbers.ctypes.data))
            tensor = torch.from_numpy(numbers)
            kernel.load(rows, replace(weight, blocks=tensor) if isinstance(weight, PackedTensor) else tensor)
            del numbers, tensor, weight
        kernel.finish()
        gc.collect()
        held = {tensor.untyped_storage().data_ptr() for tensor in kernel.tensors()}
        assert all(numbers() is None or place in held for numbers, place in memory), "weights are held twice"

    # --- tables --------------------------------------------------------------------------------------------

    def test_rows_are_looked_up(self, method: QuantizationMethod) -> None:
        """By kernels of methods that serve embeddings: in any order, more than once, and none."""
        self.require("embeddings")
        parts, kernel = self.parts(), self.kernel(method)
        assert isinstance(kernel, LooksUpRows), "a method that declares embeddings makes LooksUpRows"
        self.loaded(kernel, parts)
        ids = torch.tensor([self.shape.out_features - 1, 0, 20, 20, 50], device=self.device)
        dtype = getattr(torch, method.need.dtype)
        rows = kernel.lookup(ids, dtype)
        assert (rows.dtype, rows.shape) == (dtype, (5, self.in_features))
        assert kernel.lookup(ids[:0], dtype).shape == (0, self.in_features)
        x = self.random(17, self.in_features, method=method).double()
        exact = dense(parts).to(self.device)[ids]
        bound = (self.tolerance + torch.finfo(dtype).eps) * (x.abs() @ exact.abs().T)
        assert ((x @ (rows.double() - exact).T).abs() <= bound).all()

    # --- what is described --------------------------------------------------------------------------------------

    def test_bytes_are_those_that_are_held(self, method: QuantizationMethod) -> None:
        """What is estimated for the layer is what its kernel's tensors take, within 1%."""
        parts = self.parts()
        kernel = self.loaded(self.kernel(method), parts)
        held = sum(tensor.nbytes for tensor in kernel.tensors())
        estimated = sum(self._estimated(method, weight) for _, weight in parts)
        assert held == pytest.approx(estimated, rel=0.01), "tensors() is all that the kernel holds"

    def _estimated(self, method: QuantizationMethod, weight: Weight) -> float:
        support = method.describe(self.shape)
        if not isinstance(weight, PackedTensor):
            return support.bytes_per_weight * weight.numel()
        return support.packed_bytes_per_weight[weight.format] * weight.shape[0] * weight.shape[1]

    def test_describes_layers_without_contradiction(self, method: QuantizationMethod) -> None:
        """Of sizes that a method may not serve: a kernel and what it takes, or full precision, with a reason that is
        the end of a sentence or none, where it is meant to be so."""
        for features in ((7, 5), (33, 16), (self.in_features, 17), (self.in_features, 64)):
            shape = LinearShape("model.layers.0.self_attn.o_proj", *features, has_bias=False)
            support = method.describe(shape)
            assert method.describe(shape) == support, "what is served follows from the shape"
            if not support.is_served:
                assert support == LayerSupport(why_not=support.why_not), "what is not served takes nothing"
                assert support.why_not is None or support.why_not.strip(), "why_not is a reason or None"
                continue
            assert support.why_not is None
            assert support.bytes_per_weight > 0
            assert support.packed_bytes_per_weight.keys() == method.capabilities.packed_formats
            kernel = method.create_linear(shape, torch.device(self.device))
            kernel.load(slice(0, features[1]), torch.ones(features[1], features[0]))
            kernel.finish()
            x = self.random(2, features[0], method=method)
            assert kernel.apply(x, None).shape == (2, features[1])

    def test_layers_can_be_tried_out_without_memory(self) -> None:
        """On "meta", for methods that serve other devices than CPUs."""
        gpu = Environment("cuda", num_cpus=2, memory_bytes=2**34, devices=(DeviceInfo("a GPU", 80 * 2**30, (9, 0)),))
        options = self.plugin.Options.model_validate(dict(self.options))
        need = replace(self.need("bfloat16"), device_type="cuda")
        if self.device == "cpu" and (reasons := reasons_against(self.plugin, need, options, gpu)):
            pytest.skip(f"{self.plugin.__name__}: {' '.join(reasons)}")
        method = self.plugin(options, need)
        shape = replace(self.shape, out_features=64)
        kernel = method.create_linear(shape, torch.device("meta"))
        assert all(tensor.is_meta for tensor in kernel.tensors())

    def test_findings_are_sentences(self, method: QuantizationMethod) -> None:
        """Findings about a model of one layer are sentences."""
        findings = method.examine([self.shape])
        assert all(text.strip() for text in (*findings.refusals, *findings.warnings))

    def test_check_gives_reasons_in_sentences(self) -> None:
        """`check` gives reasons for dtypes that it does not serve, and none for others."""
        for dtype in (*DTYPES, "float64"):
            assert all(reason.strip() for reason in self.check(dtype))


def dense(parts: Sequence[tuple[slice, Weight]]) -> torch.Tensor:
    """float64 [out_features, in_features]: the weights that the parts encode."""
    ordered = sorted(parts, key=lambda part: part[0].start)
    return torch.cat([unpacked(weight).double() for _, weight in ordered])


def stacked(parts: Sequence[Weight]) -> Weight:
    """Rows of one format, one below the other."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    blocks = torch.cat([part.blocks for part in parts if isinstance(part, PackedTensor)])
    return replace(first, blocks=blocks, shape=(len(blocks), first.shape[1]))


def addresses(kernel: LinearKernel) -> list[tuple[int, int]]:
    """Where each of the kernel's tensors lies, and its bytes."""
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in kernel.tensors()]


def repeated(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor] | str:
    """The product of `x`, captured or recorded, to be called any number of times; or why there is none."""
    if x.device.type == "cuda":
        return _captured(product, x)
    _, replay = record(lambda one, _: product(one), (x, x))
    return replay if isinstance(replay, str) else replay.run


def _captured(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = product(x)

    def run() -> torch.Tensor:
        graph.replay()
        return result

    return run


__all__ = ["QuantizationSuite", "Weight", "dense", "stacked"]
