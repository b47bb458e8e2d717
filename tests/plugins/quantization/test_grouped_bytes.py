"""How much memory weights in groups take: what is estimated, held and kept, and what sleep does with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.contracts.layer_plan import LayerPlan, PlannedLayer
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import LinearShape, QuantizationNeed
from dovetail.contracts.weights import TensorInfo
from dovetail.nn import native
from dovetail.nn.huge_pages import WeightMemory
from dovetail.nn.layer_plan import bytes_held
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.packed_cache import PackedCache
from dovetail.plugins.quantization.grouped.formats import PACKED_FORMATS
from dovetail.plugins.quantization.grouped.kernel import SOURCE, GroupedLinear, MixedLinear
from dovetail.plugins.quantization.grouped.methods import FourBitMethod, GGUFMethod, GroupedOptions
from dovetail.testing.packed_blocks import random_blocks
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.plain_device import PlainDevice
from dovetail.worker.sleep import weights_sleeper

pytestmark = pytest.mark.skipif(bool(native.reasons_against(SOURCE)), reason="no C compiler")
CPU = torch.device("cpu")


def num_held(kernel: GroupedLinear | MixedLinear) -> int:
    return sum(tensor.nbytes for tensor in kernel.tensors())


def test_four_bits_are_estimated_as_they_are_held_with_the_vocabulary_in_eight() -> None:
    method = FourBitMethod(GroupedOptions(), QuantizationNeed("cpu", "float32"))
    names = ("model.embed_tokens", "model.layers.0.mlp.up_proj", "lm_head")
    layers = tuple(PlannedLayer(LinearShape(name, 64, 32, False), (f"{name}.weight",)) for name in names)
    infos = [TensorInfo(f"{name}.weight", (32, 64), "F32", 4 * 32 * 64) for name in names]
    plan = LayerPlan(layers, rest=0, caches=(), active_experts=1.0)
    held = 0
    for layer in layers:
        kernel = method.create_linear(layer.shape, CPU)
        assert isinstance(kernel, GroupedLinear)
        kernel.load(slice(0, 32), torch.randn(32, 64))
        held += num_held(kernel)
    assert plan.num_bytes(bytes_held(plan, method, 4, infos)) == held


@pytest.mark.parametrize("name", sorted(PACKED_FORMATS))
def test_packed_weights_are_estimated_as_they_are_held(name: str) -> None:
    packed = random_blocks(name, 32, num_blocks=2, seed=1)
    need = QuantizationNeed("cpu", "float32", frozenset({name}))
    method, shape = GGUFMethod(PluginOptions(), need), LinearShape("layer", packed.shape[1], 32, False)
    kernel = MixedLinear(shape, WeightMemory(), torch.float32)
    kernel.load(slice(0, 32), packed)
    kernel.finish()
    infos = [TensorInfo("layer.weight", packed.shape, name, packed.blocks.nbytes)]
    plan = LayerPlan((PlannedLayer(shape, ("layer.weight",)),), rest=0, caches=(), active_experts=1.0)
    assert plan.num_bytes(bytes_held(plan, method, 4, infos)) == num_held(kernel)
    assert method.describe(shape).least_bytes_per_weight({name}) * 32 * packed.shape[1] == num_held(kernel)


def test_weights_that_turn_out_larger_than_the_cache_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"weights")
    keeper = KernelKeeper(PackedCache(tmp_path / "weights", 5000), ["q8"], (0, 1), lambda _: 0.5)
    for name in ("one", "two"):
        shape = LinearShape(name, 64, 64, has_bias=False)
        kernel = keeper.wrap(shape, GroupedLinear(shape, WeightMemory()))
        kernel.load(slice(0, 64), torch.randn(64, 64))
        kernel.finish()
    for _ in range(2):
        key = keeper.restore([checkpoint])
        assert key is not None
        keeper.keep(key)
    [record] = [record for record in caplog.records if "model.packed_cache_gib is" in record.getMessage()]
    assert record.levelname == "WARNING"


@pytest.mark.parametrize("quantization", ["q8", "q4"])
def test_a_quantized_model_answers_alike_after_sleep(tmp_path: Path, quantization: str) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    llm = LLM(str(tmp_path), quantization=quantization, tokenizer_mode="none", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    before = llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids
    llm.engine.sleep(level=1)
    llm.engine.wake_up()
    assert llm.generate([[9, 6, 7, 8]], params)[0].outputs[0].token_ids != before
    assert llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids == before


def test_parts_in_full_precision_come_back_from_sleep() -> None:
    kernel = MixedLinear(LinearShape("layer", 64, 16, False), WeightMemory(), torch.float32)
    kernel.load(slice(0, 8), random_blocks("Q4_0", 8, num_blocks=2, seed=5))
    kernel.load(slice(8, 16), torch.randn(8, 64))
    kernel.finish()
    model, x = torch.nn.Module(), torch.randn(3, 64)
    model.kernel = kernel  # type: ignore[assignment]
    before = kernel.apply(x, None)
    sleeper = weights_sleeper(PlainDevice("cpu"), model, [], 1, pages=[])
    sleeper.set_aside()
    assert sleeper.give_back() == 8 * 64 * 4
    sleeper.take()
    sleeper.close()
    assert torch.equal(kernel.apply(x, None), before)


def test_weight_memory_cannot_be_taken_from_under_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    piece = WeightMemory().take(1000)
    assert not piece.untyped_storage().resizable()
    assert piece.data_ptr() % 64 == 0
