"""Eight bits for weights and activations: the error is what rounding both allows."""

from __future__ import annotations

import pytest
import torch

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.contracts.quantization import LayerSupport, LinearShape, QuantizationMethod, QuantizationNeed
from dovetail.plugins.quantization.w8a8.method import (
    EightBitOptions,
    FP8Linear,
    FP8Method,
    Int8ActivationLinear,
    Int8ActivationMethod,
)

SHAPE = LinearShape("layer", 64, 48, True)


@pytest.mark.parametrize(("kernel_class", "relative"), [(FP8Linear, 2**-4), (Int8ActivationLinear, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 40])
def test_the_error_is_that_of_rounding(
    kernel_class: type, relative: float | None, dtype: torch.dtype, rows: int
) -> None:
    """fp8 keeps four bits of each number, int8 a 127th of the largest of its row."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=generator)
    weight[3] = 0.0
    x, bias = torch.randn(rows, 64, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    kernel = kernel_class(SHAPE, torch.device("cpu"))
    kernel.load(slice(0, 16), weight[:16])
    kernel.load(slice(16, 48), weight[16:])
    kernel.finish()
    y = kernel.apply(x, bias)
    assert y.dtype == dtype
    wide, exact = x.double(), x.double() @ weight.double().T + bias.double()
    off_x = wide.abs() * relative if relative else wide.abs().amax(-1, keepdim=True) / 254 + torch.zeros_like(wide)
    off_w = (
        weight.abs() * relative if relative else weight.abs().amax(-1, keepdim=True) / 254 + torch.zeros_like(weight)
    )
    bound = off_x @ weight.abs().double().T + (wide.abs() + off_x) @ off_w.double().T
    bound = bound * 1.01 + 4 * torch.finfo(dtype).eps * exact.abs() + 1e-5
    assert bool(((y.double() - exact).abs() <= bound).all())


def test_which_layers_are_rounded() -> None:
    need = QuantizationNeed("cpu", "bfloat16")
    for method_class in (FP8Method, Int8ActivationMethod):
        method = method_class(EightBitOptions(), need)
        assert method.describe(SHAPE).is_served
        assert method.describe(LinearShape("lm_head", 64, 48, False)) == LayerSupport()
        odd = method.describe(LinearShape("odd", 63, 48, False))
        assert (odd.is_served, odd.why_not) == (False, "sizes that are no multiples of 16")


@pytest.mark.parametrize("method_class", [FP8Method, Int8ActivationMethod])
def test_on_gpus_there_is_nothing_to_warn_of(method_class: type[QuantizationMethod]) -> None:
    method = method_class(EightBitOptions(), QuantizationNeed("cuda", "bfloat16"))
    assert (method.examine([SHAPE]).warnings, method.describe(SHAPE).reads_once) == ((), True)


def test_refusals_say_why() -> None:
    old = Environment("cuda", 2, 2**33, devices=(DeviceInfo("an A100", 2**33, (8, 0)),))
    reasons = reasons_against(FP8Method, QuantizationNeed("cuda", "float16"), EightBitOptions(), old)
    assert "bfloat16" in reasons[0]
    assert "use w8a8" in reasons[1]
    assert reasons_against(Int8ActivationMethod, QuantizationNeed("cuda", "float16"), EightBitOptions(), old) == []
    assert (
        "float64"
        in reasons_against(Int8ActivationMethod, QuantizationNeed("cpu", "float64"), EightBitOptions(), old)[0]
    )
