"""The bundled methods that run on CPUs, in the conformance suite."""

from __future__ import annotations

import torch

from dovetail.contracts.weights import PackedTensor
from dovetail.plugins.quantization.grouped.methods import EightBitMethod, FourBitMethod, GGUFMethod
from dovetail.plugins.quantization.int4.method import Int4Method
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.plugins.quantization.w8a8.method import FP8Method, Int8ActivationMethod
from dovetail.plugins.weight_formats.int4_checkpoint import pack_groups
from dovetail.testing.packed_blocks import random_blocks
from dovetail.testing.quantization_suite import QuantizationSuite, Weight


class TestEightBits(QuantizationSuite):
    plugin = EightBitMethod
    tolerance = 0.01


class TestFourBits(QuantizationSuite):
    plugin = FourBitMethod
    tolerance = 0.04


class TestInt8(QuantizationSuite):
    plugin = Int8Method
    tolerance = 0.01


class TestFP8(QuantizationSuite):
    plugin = FP8Method
    tolerance = 0.04


class TestInt8Activations(QuantizationSuite):
    plugin = Int8ActivationMethod
    tolerance = 0.02


class TestGGUFOfOneScaleAndMinimum(QuantizationSuite):
    plugin = GGUFMethod
    tolerance = 0.01
    packed_formats = frozenset({"Q4_1"})

    def weight(self, rows: int, columns: int, seed: int) -> PackedTensor:
        return random_blocks("Q4_1", rows, columns // 32, seed)


class TestGGUFOfMixedKQuants(QuantizationSuite):
    plugin = GGUFMethod
    tolerance = 0.01
    packed_formats = frozenset({"Q4_K", "Q6_K"})

    def weight(self, rows: int, columns: int, seed: int) -> PackedTensor:
        return random_blocks("Q6_K" if seed % 10 == 2 else "Q4_K", rows, columns // 256, seed)


class TestGGUFOfThreeBits(QuantizationSuite):
    plugin = GGUFMethod
    tolerance = 0.01
    packed_formats = frozenset({"Q2_K", "Q3_K"})

    def weight(self, rows: int, columns: int, seed: int) -> PackedTensor:
        return random_blocks("Q3_K" if seed % 10 == 2 else "Q2_K", rows, columns // 256, seed)


class TestGGUFOfTables(QuantizationSuite):
    plugin = GGUFMethod
    tolerance = 0.01
    packed_formats = frozenset({"IQ4_XS", "MXFP4"})

    def weight(self, rows: int, columns: int, seed: int) -> PackedTensor:
        return (
            random_blocks("MXFP4", rows, columns // 32, seed)
            if seed % 10 == 2
            else random_blocks("IQ4_XS", rows, columns // 256, seed)
        )


class TestInt4(QuantizationSuite):
    """Two parts of one group size, which are joined, and one of another."""

    plugin = Int4Method
    tolerance = 0.01
    packed_formats = frozenset({"int4g64", "int4g128"})

    def weight(self, rows: int, columns: int, seed: int) -> PackedTensor:
        return random_groups(rows, columns, 128 if seed % 10 == 2 else 64, seed)


class TestInt4WithNumbers(QuantizationSuite):
    """A part that the checkpoint does not pack between two that it packs."""

    plugin = Int4Method
    tolerance = 0.01
    packed_formats = frozenset({"int4g64"})

    def weight(self, rows: int, columns: int, seed: int) -> Weight:
        if seed % 10 == 1:
            return super().weight(rows, columns, seed)
        return random_groups(rows, columns, 64, seed)


class TestGGUFWithNumbers(QuantizationSuite):
    plugin = GGUFMethod
    tolerance = 0.01
    packed_formats = frozenset({"Q4_K"})

    def weight(self, rows: int, columns: int, seed: int) -> Weight:
        if seed % 10 == 1:
            return super().weight(rows, columns, seed)
        return random_blocks("Q4_K", rows, columns // 256, seed)


def random_groups(rows: int, columns: int, size: int, seed: int) -> PackedTensor:
    """Weights as AWQ and GPTQ checkpoints have them."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(1, 16, (rows, columns // size), generator=generator).half()
    scales = (torch.rand(rows, columns // size, generator=generator) * 0.02 + 0.002).half()
    return pack_groups("layer", weights, zeros, scales, size)
