"""Rounded weights: products on the GPU beside those of the same weights on the CPU, and how fast weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from common import Arguments, Report, copy_bandwidth, device_seconds, run
from operators import compare, random

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.quantization import LinearKernel, LinearShape, QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.kernels import TorchLinear
from dovetail.plugins.quantization.int4.method import Int4Method
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.plugins.quantization.w8a8.method import FP8Method, Int8ActivationMethod
from dovetail.plugins.weight_formats.int4_checkpoint import unpack
from dovetail.worker.machine.environment import detect_environment

METHODS: dict[str, type[QuantizationMethod]] = {
    "fp8": FP8Method,
    "w8a8": Int8ActivationMethod,
    "int8": Int8Method,
    "int4": Int4Method,
}
ROWS = (1, 17, 64, 300)
GROUP = 128
COPIES = 6
"""Layers that take turns, more bytes than a GPU's cache holds."""


def body(report: Report, arguments: Arguments) -> None:
    """One layer of an 8B model under each method."""
    environment = detect_environment(arguments.device)
    bandwidth = copy_bandwidth(arguments)
    report.add("copy within the device", bandwidth / 1e9, "GB/s")
    plain = [TorchLinear(random(arguments, *sizes(arguments), dtype=arguments.dtype)) for _ in range(COPIES)]
    measure(report, arguments, "unquantized", plain, bandwidth)
    for name, method in METHODS.items():
        reasons = reasons_against(method, need(arguments.device, arguments.dtype), method.Options(), environment)
        if reasons:
            report.add(f"{name}: not run: {reasons[0]}"[:120], "skipped")
        else:
            check(report, arguments, name, method, bandwidth)


def need(device: str, dtype: torch.dtype) -> QuantizationNeed:
    """Of a checkpoint that `int4` holds and the others do not ask about."""
    return QuantizationNeed(device, str(dtype).removeprefix("torch."), frozenset({f"int4g{GROUP}"}))


def sizes(arguments: Arguments) -> tuple[int, int]:
    """Of the layer: out_features and in_features."""
    return (64, 256) if arguments.null else (4096, 14336)


def check(report: Report, arguments: Arguments, name: str, method: type[QuantizationMethod], bandwidth: float) -> None:
    """Decode rows, prompts, and what lies between, with a bias; then bytes of weights per second."""
    out_features, in_features = sizes(arguments)
    shape = LinearShape("model.layers.0.mlp.down_proj", in_features, out_features, has_bias=True)
    weight = packed(out_features, in_features) if name == "int4" else 0.02 * weights(out_features, in_features)
    here = loaded(method, arguments.device, arguments.dtype, shape, weight)
    oracle = loaded(method, "cpu", torch.float32, shape, weight)
    bias = random(arguments, out_features, dtype=arguments.dtype)
    for rows in ROWS:
        x = random(arguments, rows, in_features, dtype=arguments.dtype)
        expected = oracle.apply(x.cpu().float(), bias.cpu().float()).double().to(arguments.device)
        compare(report, f"{name}, {rows} rows", here.apply(x, bias), expected, 8, expected.std())
    if name in ("fp8", "w8a8") and not arguments.null:
        check_rounding(report, name, random(arguments, 300, in_features, dtype=arguments.dtype))
    layers = [here, *(loaded(method, arguments.device, arguments.dtype, shape, weight) for _ in range(COPIES - 1))]
    measure(report, arguments, name, layers, bandwidth)


def measure(report: Report, arguments: Arguments, name: str, layers: Sequence[LinearKernel], bandwidth: float) -> None:
    """Weights that are read, as a share of the copy's bytes per second."""
    _, in_features = sizes(arguments)
    held = sum(tensor.numel() * tensor.element_size() for tensor in layers[0].tensors())
    for rows in ROWS[:3]:
        x = random(arguments, rows, in_features, dtype=arguments.dtype)
        seconds = device_seconds([partial(layer.apply, x, None) for layer in layers], arguments.device)
        report.add(f"{name}, {rows} rows", 1e6 * seconds, "us")
        report.add(f"{name}, {rows} rows: weights read, share of copy bandwidth", held / seconds / bandwidth)


def check_rounding(report: Report, name: str, x: torch.Tensor) -> None:
    """The bits of activations that are rounded in one launch, and in torch step by step."""
    from dovetail.plugins.quantization.w8a8.fused import quantize_rows

    dtype, most = {"fp8": (torch.float8_e4m3fn, 448.0), "w8a8": (torch.int8, 127.0)}[name]
    values, scales = quantize_rows(x, dtype, most, most * torch.finfo(torch.float32).tiny)
    wide = x.float()
    # A tensor: torch divides by a number by multiplying with its reciprocal, on GPUs.
    expected_scales = wide.abs().amax(-1) / torch.tensor(most, device=x.device)
    expected = wide / expected_scales[:, None]
    expected = (expected.round() if name == "w8a8" else expected).to(dtype)
    same = torch.equal(scales, expected_scales) and torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    report.add(f"{name}: activations rounded as in torch", "equal" if same else "different", good=same)


def loaded(
    method: type[QuantizationMethod],
    device: str,
    dtype: torch.dtype,
    shape: LinearShape,
    weight: torch.Tensor | PackedTensor,
) -> LinearKernel:
    """The kernel of one layer."""
    kernel = method(method.Options(), need(device, dtype)).create_linear(shape, torch.device(device))
    assert kernel is not None
    kernel.load(slice(0, shape.out_features), weight)
    kernel.finish()
    return kernel


def weights(*shape: int) -> torch.Tensor:
    """The same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def packed(rows: int, columns: int) -> PackedTensor:
    """Random nibbles in groups with scales and zero points, as AWQ and GPTQ checkpoints are handed out."""
    generator = torch.Generator().manual_seed(2)
    groups = rows, columns // GROUP
    scales = torch.rand(groups, generator=generator) * 0.004
    zeros = torch.randint(0, 16, groups, generator=generator)
    header = torch.stack((scales.half(), zeros.half()), dim=-1).view(torch.uint8)
    nibbles = torch.randint(0, 256, (*groups, GROUP // 2), generator=generator, dtype=torch.uint8)
    blocks = torch.cat((header, nibbles), dim=-1).view(rows, -1)
    unpacked = partial(unpack, group_size=GROUP)
    return PackedTensor(f"int4g{GROUP}", blocks, (rows, columns), GROUP, 4 + GROUP // 2, unpacked)


if __name__ == "__main__":
    run("quantization", body)
