"""Weight-only int8: its rounding error, its kernel, and a model that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import LinearShape, QuantizationNeed
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.quantization import int8
from dovetail.plugins.quantization.int8 import Int8Linear, Int8Method
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.tiny_models import read_config, read_weights, save_tiny_model, tiny_config

CPU = torch.device("cpu")


def loaded(weight: torch.Tensor, parts: int = 1) -> Int8Linear:
    kernel = Int8Linear(LinearShape("layer", weight.shape[1], weight.shape[0], has_bias=False), CPU)
    size = weight.shape[0] // parts
    for start in range(0, weight.shape[0], size):
        kernel.load(slice(start, start + size), weight[start : start + size])
    kernel.finish()
    return kernel


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), spread=st.floats(1e-6, 1e4), rows=st.sampled_from([1, 4, 12]))
def test_each_weight_is_off_by_at_most_half_a_step(seed: int, spread: float, rows: int) -> None:
    weight = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)) * spread
    weight[0, 1:] = 0.0
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    error = (loaded(weight).dequantized(torch.float32) - weight).abs()
    assert bool((error <= step * 0.5001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(loaded(torch.zeros(3, 8)).dequantized(torch.float32), torch.zeros(3, 8))


@pytest.mark.parametrize("in_features", [8, 12, 40])
def test_sizes_that_torchs_kernel_does_not_take(in_features: int) -> None:
    """It takes 16 input features at a time, and would read beyond the end of others."""
    generator = torch.Generator().manual_seed(0)
    kernel = loaded(torch.randn(12, in_features, generator=generator))
    for rows in (1, 3):
        x = torch.randn(rows, in_features, generator=generator).bfloat16()
        expected = x.double() @ kernel.dequantized(torch.float32).double().T
        torch.testing.assert_close(kernel.apply(x, None).double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_and_many_rows_multiply_by_the_same_weights(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = loaded(torch.randn(48, 64, generator=generator) / 8, parts=3)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if has_bias else None
    expected = x.double() @ kernel.dequantized(torch.float32).double().T
    if bias is not None:
        expected = expected + bias.double()
    tolerance = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
    output = kernel.apply(x, bias)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_weights_are_written_out_only_where_bfloat16_products_are_fast(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_multiplies_bfloat16", lambda: has_instructions)
    written_out: list[torch.dtype] = []
    dequantized = Int8Linear.dequantized

    def noted(self: Int8Linear, dtype: torch.dtype) -> torch.Tensor:
        written_out.append(dtype)
        return dequantized(self, dtype)

    monkeypatch.setattr(Int8Linear, "dequantized", noted)
    kernel = loaded(torch.randn(48, 64))
    for rows in (1, int8.FEW_ROWS, int8.FEW_ROWS + 1):
        kernel.apply(torch.randn(rows, 64).bfloat16(), None)
    assert len(written_out) == int(has_instructions)


def test_layers_named_in_skip_stay_in_full_precision() -> None:
    method = Int8Method(Int8Method.Options(skip=("lm_head", "down_proj")), QuantizationNeed("cpu", "float32"))
    names = ["model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj", "lm_head"]
    served = [method.describe(LinearShape(name, 8, 8, has_bias=False)).is_served for name in names]
    assert served == [True, False, False]


def test_check_refuses_activations_that_are_not_float() -> None:
    environment = Environment(device_type="cpu", num_cpus=1, memory_bytes=1)
    assert reasons_against(Int8Method, QuantizationNeed("cpu", "bfloat16"), Int8Method.Options(), environment) == []
    (reason,) = reasons_against(Int8Method, QuantizationNeed("cpu", "int8"), Int8Method.Options(), environment)
    assert "not int8" in reason


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("features", "is_slow"), [({"avx2"}, True), ({"avx512_bf16"}, False)])
def test_check_refuses_activations_that_cpus_are_slow_with(dtype: str, features: set[str], is_slow: bool) -> None:
    environment = Environment("cpu", num_cpus=1, memory_bytes=1, cpu_features=frozenset(features))
    (reason,) = reasons_against(Int8Method, QuantizationNeed("cpu", dtype), Int8Method.Options(), environment)
    assert "use q8" in reason
    assert "model.dtype to bfloat16" in reason
    assert ("slowly" in reason) == is_slow
    assert reasons_against(Int8Method, QuantizationNeed("cuda", dtype), Int8Method.Options(), environment) == []


def test_a_skipped_layer_that_is_not_there_is_told_with_its_neighbours() -> None:
    shapes = [LinearShape(f"model.layers.0.self_attn.{name}", 8, 8, False) for name in ("qkv_proj", "o_proj")]
    method = Int8Method(Int8Method.Options(skip=("lm_head", "q_proj")), QuantizationNeed("cpu", "bfloat16"))
    (reason,) = method.examine(shapes).refusals
    assert "'q_proj'" in reason
    assert "'qkv_proj'" in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_model_stays_close_to_the_model(tmp_path: Path, dtype: Any) -> None:
    oracle = save_tiny_model(tmp_path, tiny_config("llama"))
    method = Int8Method(Int8Method.Options(), QuantizationNeed("cpu", str(dtype).removeprefix("torch.")))
    family = LlamaFamily(LlamaFamily.Options())
    harness = ModelHarness(
        family, read_config(tmp_path), read_weights(tmp_path), ReferenceBackend, dtype=dtype, quantization=method
    )
    prompt = list(range(3, 40))
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    for chunk in (None, 4):
        logits = harness.logits(prompt, chunk).float()
        assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99
