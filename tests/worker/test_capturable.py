"""What can be captured in a graph computes without looking at numbers, as on the meta device, which has none."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import AttendsLatents, AttentionBackend, AttentionLayer, AttentionSetup
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.model import ModelCapabilities, ModelFamily, ModelInputs
from dovetail.contracts.operators import MultipliesGroups, Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import LinearKernel, LinearShape, QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import PackedTensor
from dovetail.nn import BuildContext, TorchOperators, torch_operators
from dovetail.plugins.model_families.deepseek import DeepseekFamily
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.layernorm import LayerNormFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.llama4 import Llama4Family
from dovetail.plugins.model_families.moe import MoEFamily
from dovetail.plugins.model_families.transformers import TransformersFamily
from dovetail.plugins.quantization.int4.method import Int4Method
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.plugins.quantization.w8a8.method import FP8Method, Int8ActivationMethod
from dovetail.plugins.weight_formats.int4_checkpoint import pack_groups
from dovetail.testing.tiny_models import tiny_config
from dovetail.worker.capturable import why_not_captured

META = torch.device("meta")
FAMILIES: dict[str, type[ModelFamily]] = {
    "llama": LlamaFamily,
    "qwen3": LlamaFamily,
    "gemma2": GemmaFamily,
    "gemma3_text": GemmaFamily,
    "llama4_text": Llama4Family,
    "deepseek_v2": DeepseekFamily,
    "deepseek_v3": DeepseekFamily,
    "mixtral": MoEFamily,
    "qwen2_moe": MoEFamily,
    "qwen3_moe": MoEFamily,
    "falcon": LayerNormFamily,
    "gptj": LayerNormFamily,
}
METHODS: list[type[QuantizationMethod] | None] = [None, FP8Method, Int8ActivationMethod, Int8Method, Int4Method]
MIXTURES = {"llama4_text", "deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe"}


class NoAttention(AttendsLatents):
    """Computes nothing: a backend says for itself whether it can be captured."""

    capabilities = ReferenceBackend.capabilities.__class__(device_types=None, graph_capture=True)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks,)

    def plan(self, batch: Any) -> None:
        return None

    def forward(self, layer: AttentionLayer, query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return query.new_empty(query.shape)

    def latent_forward(self, layer: AttentionLayer, query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        assert self.setup.latent is not None
        return query.new_empty(*query.shape[:2], self.setup.latent.latent_size)


class GroupingOperators(TorchOperators, MultipliesGroups):
    """As those of GPUs: the products of all experts at once, here without numbers."""

    contract = (1, 1)

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), weight.shape[1])


class PackedInt4(Int4Method):
    """Its kernels are packed from the start, since no checkpoint is read here."""

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        kernel = super().create_linear(shape, device)
        has_groups = shape.in_features % 32 == 0
        numbers = torch.zeros(shape.out_features, shape.in_features)
        kernel.load(slice(0, shape.out_features), _packed(shape) if has_groups else numbers)
        kernel.finish()
        return kernel


def _packed(shape: LinearShape) -> PackedTensor:
    scales = torch.ones(shape.out_features, shape.in_features // 32, dtype=torch.float16)
    weights = torch.zeros(shape.out_features, shape.in_features, dtype=torch.uint8)
    return pack_groups(shape.name, weights, scales, scales, 32)


def build(
    model_type: str, method: type[QuantizationMethod] | None, operators: Operators, **more: Any
) -> tuple[type[ModelFamily], Any, BuildContext, AttentionBackend]:
    """A model without numbers, whose attention is bound."""
    need = QuantizationNeed("cuda", "bfloat16", packed_formats=frozenset({"int4g32"}))
    quantization = None
    if method is not None:
        cls = PackedInt4 if method is Int4Method else method
        quantization = cls(cls.Options(), need)
    context = BuildContext(
        torch.bfloat16, META, 128, "bfloat16", quantization=quantization, operators=operators, **more
    )
    family = FAMILIES[model_type]
    config = tiny_config(model_type, **({"rotary_dim": 8} if model_type == "gptj" else {})).to_dict()
    if not config.get("architectures"):
        config["architectures"] = [_ARCHITECTURES[model_type]]
    model = family(family.Options()).create(config, context)
    spec = context.attention_layers[0].cache
    layers = tuple(attention.layer for attention in context.attention_layers)
    backend = NoAttention(PluginOptions(), AttentionSetup(layers, spec, 16, "bfloat16", "meta", 4, 64, 128))
    for attention in context.attention_layers:
        attention.bind(backend, torch.empty(1, device=META))
    return family, model, context, backend


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "gptj": "GPTJForCausalLM",
}


@torch.inference_mode()
def run(model: Any) -> None:
    ids = torch.zeros(5, dtype=torch.int64, device=META)
    assert model.forward(ModelInputs(input_ids=ids, positions=ids)).hidden.shape[0] == 5


@pytest.mark.parametrize(
    "operators", [torch_operators(), GroupingOperators(PluginOptions())], ids=["torch", "grouping"]
)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__ if method else "plain")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_declared_to_be_captured_needs_no_numbers_and_the_rest_does(
    model_type: str, method: type[QuantizationMethod] | None, operators: Operators
) -> None:
    family, model, context, backend = build(model_type, method, operators)
    reason = why_not_captured(family, model, context, [backend])
    is_grouped = method is None and isinstance(operators, MultipliesGroups)
    assert (reason is None) == (model_type not in MIXTURES or is_grouped)
    if reason is None:
        run(model)
        return
    assert "waits for the number of tokens of each expert" in reason
    with pytest.raises(NotImplementedError, match="bincount"):
        run(model)


def test_experts_that_are_kept_apart_for_strict_reproducibility_are_no_graphs() -> None:
    operators = GroupingOperators(PluginOptions())
    family, model, context, backend = build("qwen3_moe", None, operators, batch_invariant=True)
    assert "waits for the number" in (why_not_captured(family, model, context, [backend]) or "")


def test_parts_that_declare_nothing_are_named() -> None:
    """A plugin written before the capability, say."""
    family, model, context, backend = build("llama", FP8Method, torch_operators())

    class Silent(LlamaFamily):
        capabilities = ModelCapabilities(quantization=True)

    class SilentMethod(FP8Method):
        capabilities = FP8Method.capabilities.__class__()

    class OlderOperators(TorchOperators):
        contract = (1, 0)

    class WaitingOperators(TorchOperators):
        contract = (1, 1)
        capabilities = TorchOperators.capabilities.__class__(graph_capture=False)

    class SilentBackend(NoAttention):
        capabilities = NoAttention.capabilities.__class__()

    assert why_not_captured(family, model, context, [backend]) is None
    _assert_named(Silent, "ModelCapabilities", why_not_captured(Silent, model, context, [backend]))
    silent = SilentBackend(PluginOptions(), backend.setup)
    _assert_named(SilentBackend, "AttentionCapabilities", why_not_captured(family, model, context, [backend, silent]))
    for operators in (OlderOperators, WaitingOperators):
        context.operators = operators(PluginOptions())
        _assert_named(operators, "OperatorsCapabilities", why_not_captured(family, model, context, [backend]))
    context.quantization = SilentMethod(FP8Method.Options(), QuantizationNeed("cuda", "bfloat16"))
    _assert_named(SilentMethod, "QuantizationCapabilities", why_not_captured(family, model, context, [backend]))


def _assert_named(cls: type, capabilities: str, reason: str | None) -> None:
    """The part, and what its author is to declare."""
    assert reason is not None
    assert f"{cls.__name__} does not declare that it can be captured" in reason
    assert f"its author declares {capabilities}.graph_capture" in reason


def test_every_bundled_family_and_every_method_of_gpus_is_tried_here() -> None:
    """`transformers` runs code that nobody here has read, and declares nothing."""
    assert not TransformersFamily.capabilities.graph_capture
    families = {entry.load() for entry in entry_points(group=KINDS["model_family"].group)}
    assert {each for each in families if each.capabilities.graph_capture} == set(FAMILIES.values())
    methods = {entry.load() for entry in entry_points(group=KINDS["quantization"].group)}
    for each in methods:
        on = each.capabilities.device_types
        assert (each in METHODS) == (on is None or "cuda" in on)


@pytest.mark.parametrize("kind", ["model_family", "quantization", "operators"])
def test_plugins_that_declare_it_declare_the_contract_that_has_it(kind: str) -> None:
    """An older host then refuses them with a hint, and does not fail over an unknown capability."""
    declaring = [
        each
        for entry in entry_points(group=KINDS[kind].group)
        if (each := entry.load()).capabilities.graph_capture
        and each is not TorchOperators
        and entry.dist
        and entry.dist.name == "dovetail"
    ]
    assert declaring
    assert [each.__name__ for each in declaring if each.contract < (1, 1)] == []
