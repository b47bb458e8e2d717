"""What the suite of quantization methods finds: each a change in a method that passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import (
    Findings,
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.nn import native
from dovetail.plugins.quantization.grouped.kernel import SOURCE, GroupedLinear, _Segment
from dovetail.plugins.quantization.grouped.methods import EightBitMethod
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.quantization_suite import QuantizationSuite


class Kernel(LinearKernel):
    """int8 with one scale per output feature, the scales in a list of their own."""

    def __init__(self, shape: LinearShape, device: torch.device):
        self.weight = torch.zeros(shape.out_features, shape.in_features, dtype=torch.int8, device=device)
        self.scales = torch.zeros(shape.out_features, 1, device=device)

    def load(self, rows: slice, weight: Any) -> None:
        scale = self.scale(weight.float())
        self.scales[rows] = scale
        self.weight[rows] = self.rounded(weight.float() / scale).to(torch.int8)

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.round()

    def numbers(self) -> torch.Tensor:
        return self.weight * self.scales

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = (x.float() @ self.numbers().T).to(x.dtype)
        return y if bias is None else y + bias


class Method(QuantizationMethod):
    """Takes input sizes that are multiples of 16."""

    contract = (1, 0)
    capabilities = QuantizationCapabilities(
        device_types=frozenset({"cpu", "cuda"}), dtypes=frozenset({"float32", "bfloat16", "float16"}), reloads_rows=True
    )
    kernel: ClassVar[type[Kernel]] = Kernel
    share: ClassVar[float] = 1.0

    @classmethod
    def check(cls, need: QuantizationNeed, options: Any, environment: Environment) -> list[str]:
        return [] if need.dtype == "float32" or need.device_type == "cuda" else ["one dtype is enough"]

    def describe(self, shape: LinearShape) -> LayerSupport:
        if shape.in_features % 16:
            return LayerSupport(why_not="input sizes that are no multiple of 16")
        return LayerSupport(is_served=True, bytes_per_weight=self.share * (1 + 4 / 1024))

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        return self.kernel(shape, device)


def over(kernel: type[Kernel]) -> type[Method]:
    """The method with another kernel."""
    return type(kernel.__name__, (Method,), {"kernel": kernel})


class DropsTheBias(Kernel):
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(x, None)


class Truncates(Kernel):
    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.trunc()


class RoundsDown(Kernel):
    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.floor()


class DividesBy128(Kernel):
    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return super().scale(weight) * 127 / 128


class ScalesBy128(Kernel):
    def numbers(self) -> torch.Tensor:
        return super().numbers() * 127 / 128


class InAList(Kernel):
    """The numbers, multiplied out, where `tensors` does not look."""

    def finish(self) -> None:
        self.kept = [super().numbers()]

    def numbers(self) -> torch.Tensor:
        return self.kept[0]


class KeepsTheOriginal(Kernel):
    def load(self, rows: slice, weight: Any) -> None:
        super().load(rows, weight)
        self.__dict__.setdefault("originals", []).append(weight)


class DividesByNothing(Kernel):
    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().amax(1, keepdim=True) / 127

    def numbers(self) -> torch.Tensor:
        return (self.scales * 0 / self.scales) + super().numbers()


class OneScale(Kernel):
    def load(self, rows: slice, weight: Any) -> None:
        super().load(rows, weight)
        self.scales[:] = self.scales[rows][0]


class WritesIntoX(Kernel):
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = super().apply(x, bias)
        x.zero_()
        return y


class LoadsOnce(Kernel):
    is_loaded = False

    def load(self, rows: slice, weight: Any) -> None:
        if not self.is_loaded:
            super().load(rows, weight)

    def finish(self) -> None:
        self.is_loaded = True


class Moves(Kernel):
    """Makes new tensors when it is loaded again, as one that packs in `finish` does."""

    def finish(self) -> None:
        self.weight = self.weight.clone()


class KeepsScales(Kernel):
    """Those of the first round."""

    is_loaded = False

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return self.scales[: len(weight)] if self.is_loaded else super().scale(weight)

    def finish(self) -> None:
        self.is_loaded = True


class OneScaleForWhatComes(Kernel):
    """Rounds what one call brings together, so that the cut shows."""

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.abs().max() / 127).expand(len(weight), 1)


class CountsRows(Kernel):
    """Takes a round for over when as many rows came as it has."""

    num_rows = 0

    def load(self, rows: slice, weight: Any) -> None:
        if self.num_rows < len(self.weight):
            super().load(rows, weight)
        self.num_rows += len(weight)

    def finish(self) -> None:
        self.num_rows = 0


class WantsRowsInOrder(Kernel):
    """Puts each part behind the one before."""

    start = 0

    def load(self, rows: slice, weight: Any) -> None:
        super().load(slice(self.start, self.start + len(weight)), weight)
        self.start = (self.start + len(weight)) % len(self.weight)


class ServesAndSaysWhyNot(Method):
    def describe(self, shape: LinearShape) -> LayerSupport:
        return replace(super().describe(shape), why_not="all sizes")


class DescribesWhatItCannotServe(Method):
    class Strict(Kernel):
        def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if x.shape[1] % 16:
                raise ValueError("no multiple of 16")
            return super().apply(x, bias)

    kernel = Strict

    def describe(self, shape: LinearShape) -> LayerSupport:
        return LayerSupport(is_served=True, bytes_per_weight=1 + 4 / 1024)


class HoldsWithoutNumbers(Method):
    """Says that it holds a format, and not what it takes."""

    capabilities = replace(Method.capabilities, packed_formats=frozenset({"Q4_1"}))


class MemoryOnMeta(Method):
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        return self.kernel(shape, torch.device("cpu"))


class NothingOnMeta(Method):
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        if device.type == "meta":
            raise NotImplementedError("no kernel for meta")
        return super().create_linear(shape, device)


class RaisesForOddSizes(Method):
    def describe(self, shape: LinearShape) -> LayerSupport:
        if shape.in_features % 16:
            raise ValueError("no multiple of 16")
        return super().describe(shape)


class WarnsOfNothing(Method):
    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        return Findings(warnings=("",))


class ClaimsEmbeddings(Method):
    capabilities = replace(Method.capabilities, embeddings=True)


class TakesMore(Method):
    share = 1.03


class KeepsSmallRows(Method):
    """Rows whose scale in memory is less than none are taken for ones that shall stay."""

    class Keeps(Kernel):
        def load(self, rows: slice, weight: Any) -> None:
            stays = self.scales[rows] < 0
            old = self.weight[rows].clone()
            super().load(rows, weight)
            self.weight[rows] = torch.where(stays, old, self.weight[rows])

    kernel = Keeps


class ClaimsToReloadRows(Method):
    kernel = OneScaleForWhatComes


class CopiesForCalls(EightBitMethod):
    """Native code reads a copy of the weights, which each round makes anew."""

    class Copying(GroupedLinear):
        def finish(self) -> None:
            own = self._parts  # what later rounds write into
            copies = {first: replace(part, data=part.data.clone()) for first, part in own.items()}
            self._parts, self._segments = copies, (_Segment * 0)()
            super().finish()
            self._parts = own
            # Recorded calls still read the former ones, whose memory must not be that of the new ones by chance.
            self.__dict__.setdefault("former", []).append((self._segments, copies))

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        return self.Copying(shape, self.memory)


class ClaimsInvariance(Method):
    capabilities = replace(Method.capabilities, batch_invariant=True)

    class Varies(Kernel):
        def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return super().apply(x, bias) * (1 + 1e-6 * len(x))

    kernel = Varies


class SaysNothing(Method):
    @classmethod
    def check(cls, need: QuantizationNeed, options: Any, environment: Environment) -> Iterable[str]:
        return [""] if need.dtype == "float16" else super().check(need, options, environment)


FAULTS = [
    Fault("drops the bias", over(DropsTheBias), "test_a_bias_is_added"),
    Fault("cuts weights instead of rounding them", over(Truncates), "test_rounding_has_no_direction"),
    Fault("rounds weights down", over(RoundsDown), "test_rounding_has_no_direction"),
    Fault("has 128 steps, one too many for int8", over(DividesBy128), "test_rounding_has_no_direction"),
    Fault("multiplies with steps of 1/128", over(ScalesBy128), "test_rounding_has_no_direction"),
    Fault("keeps its weights in a list", over(InAList), "test_tensors_are_all_that_is_read"),
    Fault("keeps the original weights as well", over(KeepsTheOriginal), "test_weights_that_were_taken_in_are_let_go"),
    Fault("gives NaN for a block of zeros", over(DividesByNothing), "test_zeros_stay_zeros"),
    Fault("serves a layer and says why not", ServesAndSaysWhyNot, "test_describes_layers_without_contradiction"),
    Fault("describes what it cannot serve", DescribesWhatItCannotServe, "test_describes_layers_without_contradiction"),
    Fault("reports no bytes of a format", HoldsWithoutNumbers, "test_describes_layers_without_contradiction"),
    Fault("takes memory for meta", MemoryOnMeta, "test_layers_can_be_tried_out_without_memory"),
    Fault("makes no kernel on meta", NothingOnMeta, "test_layers_can_be_tried_out_without_memory"),
    Fault("raises where it is asked about odd sizes", RaisesForOddSizes, "test_describes_layers_without_contradiction"),
    Fault("warns without words", WarnsOfNothing, "test_findings_are_sentences"),
    Fault("declares embeddings falsely", ClaimsEmbeddings, "test_rows_are_looked_up"),
    Fault("reports 3% too many bytes", TakesMore, "test_bytes_are_those_that_are_held"),
    Fault("has one scale for all parts", over(OneScale), "test_products_are_within_tolerance"),
    Fault("writes into its input", over(WritesIntoX), "test_products_are_within_tolerance"),
    Fault("is loaded once only", over(LoadsOnce), "test_loading_again_keeps_the_memory"),
    Fault("moves when it is loaded again", over(Moves), "test_loading_again_keeps_the_memory"),
    Fault("keeps the scales of the first weights", over(KeepsScales), "test_loading_again_keeps_the_memory"),
    Fault(
        "rounds the rows of a call together, and claims to reload some",
        ClaimsToReloadRows,
        "test_some_rows_are_loaded_again",
    ),
    Fault("goes on with a failed round", over(CountsRows), "test_a_round_that_failed_half_way_is_followed_by_another"),
    Fault("keeps rows by what was in memory", KeepsSmallRows, "test_a_round_owes_nothing_to_what_was_there"),
    Fault("takes parts as they come", over(WantsRowsInOrder), "test_parts_come_in_any_order"),
    Fault("declares batch invariance falsely", ClaimsInvariance, "test_rows_do_not_depend_on_the_batch"),
    Fault("refuses without a reason", SaysNothing, "test_check_gives_reasons_in_sentences"),
]


NATIVE_FAULTS = [
    Fault("gives native code new copies", CopiesForCalls, "test_recorded_products_see_new_weights"),
]
"""Of methods with kernels in C."""


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_method_that(fault: Fault) -> None:
    check_fault(fault, QuantizationSuite, plugin=fault.plugin, tolerance=0.01)


@pytest.mark.skipif(bool(native.reasons_against(SOURCE)), reason="no C compiler")
@pytest.mark.parametrize("fault", NATIVE_FAULTS, ids=str)
def test_the_suite_finds_a_native_method_that(fault: Fault) -> None:
    check_fault(fault, QuantizationSuite, plugin=fault.plugin, tolerance=0.01)


class TestMethod(QuantizationSuite):
    plugin = Method
    tolerance = 0.01
