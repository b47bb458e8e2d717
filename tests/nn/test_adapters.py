"""Low-rank adapters in linear layers and whole models, against weights that they were merged into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.model import AdapterRows
from dovetail.contracts.operators import Operators
from dovetail.nn import (
    AdapterSpace,
    BuildContext,
    Communicator,
    Linear,
    LowRank,
    MergedColumnLinear,
    QKVLinear,
    RowLinear,
    load_weights,
    native,
    torch_operators,
)
from dovetail.nn.adapters import without_adapters
from dovetail.nn.planning import PlannedRank
from dovetail.plugins.model_families.layernorm import LayerNormFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.operators.native import NativeOperators, low_rank
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.plain_attention import PlainAttention
from dovetail.testing.thread_ranks import run_in_threads
from dovetail.testing.tiny_models import tiny_config, tiny_model
from dovetail.worker.forward import compiled, model_pass

CPU = torch.device("cpu")
SHAPES = {"q": (16, 12), "k": (8, 12), "v": (8, 12), "gate": (6, 12), "up": (6, 12), "down": (10, 8)}


def space(max_loras: int = 3, max_rank: int = 4, dtype: torch.dtype = torch.float32, **given: Any) -> AdapterSpace:
    return AdapterSpace(max_loras, max_rank, dtype, given.get("device", CPU))


def adapter(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> dict[str, LowRank]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        name: LowRank(torch.randn(rank, columns, generator=drawn), torch.randn(rows, rank, generator=drawn), 0.25)
        for name, (rows, columns) in shapes.items()
    }


def merged(weights: Mapping[str, torch.Tensor], layers: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    return dict(weights) | {
        f"{name}.weight": weights[f"{name}.weight"] + given.scale * given.b @ given.a for name, given in layers.items()
    }


def rank_of(rank: int, size: int) -> Communicator:
    communicator = PlannedRank(size)
    communicator.rank = rank
    return communicator


def native_operators() -> Operators:
    if reasons := native.reasons_against(low_rank.SOURCE):
        pytest.skip(" ".join(reasons))
    return NativeOperators(NativeOperators.Options())


def blocks(
    adapters: AdapterSpace | None,
    rank: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    operators: Operators | None = None,
) -> list[Linear]:
    """One of each sharded kind, on one rank."""
    context = BuildContext(
        dtype, CPU, 64, "float32", rank_of(rank, size), operators=operators or torch_operators(), adapters=adapters
    )
    return [
        QKVLinear(context, "qkv", 12, 8, 4, 2, ("q", "k", "v")),
        MergedColumnLinear(context, "gate_up", 12, {"gate": 6, "up": 6}, bias=True),
        RowLinear(context, "down", 8, 10, bias=True, reduce=False),
    ]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        *((torch_operators, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((native_operators, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_each_row_gets_what_its_adapters_merged_weights_give(
    make: Callable[[], Operators], dtype: torch.dtype, size: int
) -> None:
    """Ranks below the largest, rows in any order, and rows without one; each rank's share of it."""
    drawn = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
    weights |= {f"{name}.bias": torch.randn(SHAPES[name][0], generator=drawn) for name in ("gate", "up", "down")}
    given = [adapter(SHAPES, 4, 1), adapter(SHAPES, 1, 2), adapter({"k": SHAPES["k"], "down": SHAPES["down"]}, 3, 3)]
    slots = torch.tensor([2, -1, 0, 1, 0, -1, 2], dtype=torch.int32)
    operators = make()
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(dtype, 1e-5)
    for rank in range(size):
        made = space(dtype=dtype)
        ours = blocks(made, rank, size, dtype, operators)
        for layer in ours:
            load_weights(layer, [(name, tensor) for name, tensor in weights.items() if name in layer.expected()])
        for slot, layers in enumerate(given):
            made.load(slot, layers)
        for number, layer in enumerate(ours):
            x = torch.randn(7, layer.adapters.a.shape[-1], generator=drawn).to(dtype)  # type: ignore[union-attr]
            with made.bound(AdapterRows(slots=slots)):
                found = layer(x)
            for row, slot in enumerate(slots.tolist()):
                theirs = blocks(None, rank, size, dtype)[number]
                source = merged(weights, given[slot]) if slot >= 0 else weights
                load_weights(theirs, [(name, tensor) for name, tensor in source.items() if name in theirs.expected()])
                torch.testing.assert_close(found[row], theirs(x[row : row + 1])[0], rtol=tolerance, atol=tolerance)


def test_rows_do_not_change_each_other_in_strict_mode() -> None:
    """With torch's operators too, which compute slot by slot otherwise."""
    made = space()
    context = BuildContext(torch.float32, CPU, 64, "float32", batch_invariant=True, adapters=made)
    layer = RowLinear(context, "down", 300, 200)
    load_weights(layer, [("down.weight", torch.zeros(200, 300))])
    made.load(0, adapter(made.expected(), 4, 0))
    x, slots = torch.randn(33, 300, generator=torch.Generator().manual_seed(0)), torch.zeros(33, dtype=torch.int32)
    with made.bound(AdapterRows(slots=slots)):
        together = layer(x)
    for row in range(33):
        with made.bound(AdapterRows(slots=slots[:1])):
            assert torch.equal(layer(x[row : row + 1])[0], together[row])


def checkpoint(**overrides: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model = tiny_model(tiny_config("llama", **overrides))
    return {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}, dict(model.state_dict())


def harness(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], **settings: Any) -> ModelHarness:
    return ModelHarness(LlamaFamily(LlamaFamily.Options()), config, weights.items(), PlainAttention, **settings)


@torch.inference_mode()
def hidden(runner: ModelHarness, prompts: list[list[int]], slots: list[int] | None) -> list[torch.Tensor]:
    inputs = runner.plan([(number, prompt, 0) for number, prompt in enumerate(prompts)])
    lengths = [len(prompt) for prompt in prompts]
    if slots is not None:
        rows = torch.repeat_interleave(torch.tensor(slots, dtype=torch.int32), torch.tensor(lengths))
        inputs = replace(inputs, adapters=AdapterRows(slots=rows))
    return list(runner.model.forward(inputs).hidden.split(lengths))


PROMPTS = [[5, 9, 3, 70], [8], [11, 4, 30, 2, 6], [5, 9, 3]]


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_of_adapters_computes_what_models_with_merged_weights_do(size: int) -> None:
    config, weights = checkpoint()

    def work(communicator: Communicator) -> list[torch.Tensor]:
        made = space()
        runner = harness(weights, config, adapters=made, communicator=communicator)
        for slot in range(2):
            made.load(slot, adapter(made.expected(), 4 - slot, slot))
        before = hidden(runner, PROMPTS, None)
        found = hidden(runner, PROMPTS, [1, -1, 0, 0])
        after = hidden(runner, PROMPTS, None)
        assert all(map(torch.equal, before, after)), "rows that stay bound"
        torch.testing.assert_close(before[1], found[1])
        return found

    whole = space()
    harness(weights, config, adapters=whole)
    sources = [merged(weights, adapter(whole.expected(), 4 - slot, slot)) for slot in range(2)]
    models = [harness(source, config) for source in (sources[1], weights, sources[0], sources[0])]
    alone = [hidden(model, [prompt], None)[0] for model, prompt in zip(models, PROMPTS, strict=True)]
    for found in run_in_threads(size, work):
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_rows_are_unbound_after_an_error_too() -> None:
    made = space()
    with pytest.raises(KeyError), made.bound(AdapterRows(slots=torch.tensor([0], dtype=torch.int32))):
        raise KeyError("in the pass")
    assert made.rows is None


def test_a_slot_is_used_again_without_traces() -> None:
    config, weights = checkpoint()
    made, fresh = space(), space()
    runner, other = harness(weights, config, adapters=made), harness(weights, config, adapters=fresh)
    made.load(0, adapter(made.expected(), 4, 1))
    some = dict(list(adapter(made.expected(), 1, 2).items())[:3])
    made.load(0, some)
    fresh.load(0, some)
    assert torch.equal(hidden(runner, PROMPTS[:1], [0])[0], hidden(other, PROMPTS[:1], [0])[0])
    made.clear(0)
    assert torch.equal(hidden(runner, PROMPTS[:1], [0])[0], hidden(runner, PROMPTS[:1], [-1])[0])


def test_fused_layers_of_a_checkpoint_are_split() -> None:
    """Phi-3's qkv_proj and gate_up_proj."""
    model = tiny_model(tiny_config("phi3"))
    config = {**model.config.to_dict(), "architectures": ["Phi3ForCausalLM"]}
    weights = dict(model.state_dict())
    made = space()
    runner = harness(weights, config, adapters=made)
    names = [name.removesuffix(".weight") for name in weights if "_proj" in name]
    given = adapter({name: tuple(weights[f"{name}.weight"].shape) for name in names}, 2, 5)  # type: ignore[misc]
    made.load(2, given)
    assert not made.expected().keys() >= given.keys()
    found, expected = (
        hidden(runner, PROMPTS[:1], [2]),
        hidden(harness(merged(weights, given), config), PROMPTS[:1], None),
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=2e-5)


@torch.inference_mode()
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_pass_adds_the_adapters_of_its_rows() -> None:
    config, weights = checkpoint(num_hidden_layers=1)
    made = space()
    runner = harness(weights, config, adapters=made)
    made.load(0, adapter(made.expected(), 4, 0))
    inputs = runner.plan([(0, [5, 9, 3, 70], 0), (1, [4], 0)])
    assert inputs.input_ids is not None
    run = compiled(runner.model, model_pass(runner.model), "default")
    for slots in ([0, 0, 0, 0, -1], None, [-1, -1, -1, -1, 0]):
        rows = None if slots is None else torch.tensor(slots, dtype=torch.int32)
        adapters = None if rows is None else AdapterRows(slots=rows)
        expected = runner.model.forward(replace(inputs, adapters=adapters)).hidden
        torch.testing.assert_close(run(inputs.input_ids, inputs.positions, rows)[0], expected, rtol=1e-4, atol=1e-5)


def test_rows_that_cannot_be_split_are_refused() -> None:
    """GPT-J turns the rows of each head, and Bloom splits fused ones, of which one is given alone as well."""
    made = {}
    for model_type, architecture in (("gptj", "GPTJForCausalLM"), ("bloom", "BloomForCausalLM")):
        config = {**tiny_config(model_type).to_dict(), "architectures": [architecture]}
        context = BuildContext(torch.float32, CPU, 64, "float32", adapters=space())
        LayerNormFamily(LayerNormFamily.Options()).create(config, context)
        made[model_type] = context.adapters
    name, gptj, bloom = "transformer.h.0.attn.q_proj", made["gptj"], made["bloom"]
    assert gptj is not None
    with pytest.raises(ModelError, match=rf"B of {name} \[63, 2\] cannot be split as the model's weights are"):
        gptj.check(adapter({name: (63, 64)}, 2, 1))
    assert bloom is not None
    own = "model.layers.0.self_attn.q_proj"
    rows, columns = bloom.expected()[own]
    fused = "transformer.h.0.self_attention.query_key_value"
    with pytest.raises(ModelError, match=rf"the adapter has {own} twice, the second time in {fused}"):
        bloom.check(adapter({own: (rows, columns), fused: (3 * rows, columns)}, 2, 1))


def test_layers_of_other_stages_are_left_out() -> None:
    config, weights = checkpoint()
    whole, made = space(), space()
    harness(weights, config, adapters=whole)
    harness(weights, config, adapters=made, layers=range(1, 2), is_first_stage=False)
    layers = adapter(whole.expected(), 2, 1)
    assert set(made.translated(layers)) == set(made.expected()) < set(layers)
    made.load(0, layers)


def without(layers: dict[str, LowRank], name: str, **changes: Any) -> dict[str, LowRank]:
    return layers | {name: replace(layers[name], **changes)}


def test_what_does_not_fit_is_refused_and_named() -> None:
    config, weights = checkpoint()
    made = space()
    harness(weights, config, adapters=made)
    good = adapter(made.expected(), 4, 1)
    name = "model.layers.0.mlp.down_proj"
    rows, columns = made.expected()[name]
    wrong = {
        rf"{name} is for a layer \[{rows}, 5\], and the model's is \[{rows}, {columns}\]": without(
            good, name, a=torch.ones(4, 5)
        ),
        "no pair of one rank": without(good, name, a=torch.ones(3, columns)),
        "its rank is 5, and slots hold up to 4: raise lora.max_rank": adapter(made.expected(), 5, 1),
        "no linear layer that takes adapters called lm_head": good | adapter({"lm_head": (5, 5)}, 1, 1),
    }
    made.load(1, good)
    before = [layer.a.clone() for layer in made.layers]
    for reason, layers in wrong.items():
        for call in (made.check, lambda given: made.load(1, given)):
            with pytest.raises(ModelError, match=reason):
                call(layers)
    assert all(torch.equal(layer.a, kept) for layer, kept in zip(made.layers, before, strict=True))
    with pytest.raises(ValueError, match="slot 3 of 3"):
        made.load(3, good)


def test_the_bytes_of_a_slot_are_known_without_memory() -> None:
    config, weights = checkpoint()
    made, planned = space(), space(device=torch.device("meta"))
    harness(weights, config, adapters=made)
    LlamaFamily(LlamaFamily.Options()).create(
        config, BuildContext(torch.float32, torch.device("meta"), 64, "float32", adapters=planned)
    )
    held = sum(tensor.nbytes for layer in made.layers for tensor in (layer.a, layer.b))
    assert planned.bytes_per_slot == made.bytes_per_slot == held // 3
    planned.check(adapter(made.expected(), 4, 1))
    assert planned.expected() == made.expected()


class ForeignRegistry:
    """A registry that the blocks know nothing of."""

    max_loras, max_rank = 1, 1


def test_another_registry_is_refused() -> None:
    context = BuildContext(torch.float32, CPU, 64, "float32", adapters=ForeignRegistry())  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"ForeignRegistry: the blocks of dovetail\.nn take an AdapterSpace"):
        RowLinear(context, "down", 8, 10)


def test_two_layers_of_one_name_are_refused() -> None:
    context = BuildContext(torch.float32, CPU, 64, "float32", adapters=space())
    RowLinear(context, "down", 8, 10)
    with without_adapters(context):
        RowLinear(context, "down", 8, 10)
    with pytest.raises(ModelError, match="two linear layers are called down"):
        RowLinear(context, "down", 8, 10)
