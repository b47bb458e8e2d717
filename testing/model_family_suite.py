"""The conformance suite of model families. A third party's test is a subclass::

    from dovetail.testing import ModelFamilySuite

    class TestMyFamily(ModelFamilySuite):
        plugin = MyFamily

Its model is a random one of a few thousand parameters, its oracle the transformers model of the family's first
architecture. For others set `model_type`; for what transformers does not know override `create_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.attention import AttentionLayer
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import AdapterRows, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.quantization import (
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.nn import AdapterSpace, Communicator, LowRank
from dovetail.nn.operators import TorchOperators
from dovetail.nn.planning import against_size
from dovetail.testing.low_rank_cases import merged, random_adapter
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.plain_attention import PlainLatentAttention
from dovetail.testing.suite import PluginSuite
from dovetail.testing.thread_ranks import run_in_threads
from dovetail.testing.tiny_models import read_config, read_weights, save_tiny_model, tiny_config


@dataclass(frozen=True)
class FamilyCheckpoint:
    """A small model with its expected outputs."""

    config: Mapping[str, Any]
    """The config as in config.json."""
    weights: Mapping[str, torch.Tensor]
    """Tensors by their names in the checkpoint's files."""
    num_parameters: int
    compute: Callable[[Sequence[int]], tuple[torch.Tensor, Sequence[torch.Tensor]]]
    """Token ids of a sequence -> float32 logits [T, vocab_size], and the residual stream [T, hidden_size] that enters
    each layer."""


class CountingOperators(TorchOperators):
    """Torch's operators, which count their calls."""

    def __init__(self) -> None:
        super().__init__(PluginOptions())
        self.names: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in ("rms_norm", "add_rms_norm", "silu_mul", "rotate"):
            self.names.add(name)
        return super().__getattribute__(name)


class AskedMethod(QuantizationMethod):
    """Serves no layer, and records the layers that it was asked about."""

    contract = (1, 0)
    capabilities = QuantizationCapabilities()

    def __init__(self) -> None:
        super().__init__(PluginOptions(), QuantizationNeed("cpu", "float32"))
        self.shapes: list[LinearShape] = []

    def describe(self, shape: LinearShape) -> LayerSupport:
        """Serves no layer."""
        self.shapes.append(shape)
        return LayerSupport()

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Raises: it is never called."""
        raise AssertionError(f"{shape} is left in full precision")


class CountedAttention(PlainLatentAttention):
    """Records the order in which layers are computed."""

    order: ClassVar[list[int]] = []

    def forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        """Records the layer, then computes it."""
        self.order.append(layer.layer_id)
        return super().forward(layer, *tensors)

    def latent_forward(self, layer: AttentionLayer, *tensors: torch.Tensor) -> torch.Tensor:
        """Records the layer, then computes it."""
        self.order.append(layer.layer_id)
        return super().latent_forward(layer, *tensors)


class ModelFamilySuite(PluginSuite):
    """Tests of every model family. A plugin author sets `plugin`, and other attributes where they differ."""

    kind: ClassVar[str] = "model_family"
    plugin: ClassVar[type[ModelFamily]]
    options: ClassVar[Mapping[str, Any]] = {}
    model_type: ClassVar[str | None] = None
    """As transformers calls it; None: that of the family's first architecture."""
    overrides: ClassVar[Mapping[str, Any]] = {}
    """Keys of the config besides those of `dovetail.testing.tiny_models`."""
    max_model_len: ClassVar[int] = 256
    """Longest sequence that the config declares."""
    tolerance: ClassVar[float] = 2e-5
    """How far a logit may be from the oracle's, in float32."""
    needs_operators: ClassVar[bool] = True
    """False for an architecture without anything that `Operators` computes: no RMSNorm, gate or rotation."""
    unadapted: ClassVar[Sequence[str]] = (r".*experts?\..*", r".*(router|\.gate)\..*")
    """Patterns of weights in numbered layers that need not take adapters, where the family declares `adapters`."""

    # --- hooks and helpers ---------------------------------------------------------------------------------

    def create_checkpoint(self, directory: Path, is_tied: bool) -> FamilyCheckpoint:
        """A model whose output layer has the weights of the token embedding, or weights of its own. Here transformers
        makes it, in `directory`."""
        config = tiny_config(
            self.model_type or _model_type(self.plugin.architectures[0]),
            **{"tie_word_embeddings": is_tied, "max_position_embeddings": self.max_model_len, **self.overrides},
        )
        oracle = save_tiny_model(directory, config)

        def compute(token_ids: Sequence[int]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
            with torch.no_grad():
                output = oracle(torch.tensor([list(token_ids)]), output_hidden_states=True)
            # The last is behind the final norm.
            return output.logits[0], [state[0] for state in output.hidden_states[:-1]]

        return FamilyCheckpoint(read_config(directory), dict(read_weights(directory)), oracle.num_parameters(), compute)

    @pytest.fixture(scope="class", params=[False, True], ids=["untied", "tied"])
    @classmethod
    def checkpoint(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
        """With an output layer of its own, and with that of the embedding."""
        return cls().create_checkpoint(tmp_path_factory.mktemp("family"), request.param)

    def family(self) -> ModelFamily:
        """The family, made as the host makes it."""
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)))

    def check(self, config: Mapping[str, Any], tensor_parallel: int = 1) -> list[str]:
        """Returns the family's reasons against a config."""
        need = ModelNeed(config=config, tensor_parallel=tensor_parallel, device_type="cpu", dtype="float32")
        options = self.plugin.Options.model_validate(dict(self.options))
        return reasons_against(self.plugin, need, options, Environment("cpu", num_cpus=2, memory_bytes=2**34))

    def harness(self, checkpoint: FamilyCheckpoint, **settings: Any) -> ModelHarness:
        """The family's model with the checkpoint's weights, over pages."""
        backend = settings.pop("backend_class", PlainLatentAttention)
        return ModelHarness(self.family(), checkpoint.config, checkpoint.weights.items(), backend, **settings)

    def prompt(self, checkpoint: FamilyCheckpoint, num_tokens: int = 30, seed: int = 1) -> list[int]:
        """Random tokens of the vocabulary."""
        size = self.size(checkpoint).vocab_size
        drawn = torch.randint(3, size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
        return [int(token) for token in drawn]

    def size(self, checkpoint: FamilyCheckpoint) -> ModelSize:
        """Returns the sizes that the family gives for the config."""
        return self.family().size(checkpoint.config)

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Within `tolerance`."""
        torch.testing.assert_close(actual, expected, rtol=0, atol=self.tolerance)

    # --- what is computed ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunk", [None, 1, 7], ids=["whole", "token by token", "in chunks"])
    def test_logits_equal_the_oracle(self, checkpoint: FamilyCheckpoint, chunk: int | None) -> None:
        """A prompt at once and in parts, over pages out of order."""
        prompt = self.prompt(checkpoint)
        self.assert_close(self.harness(checkpoint).logits(prompt, chunk), checkpoint.compute(prompt)[0])

    def test_requests_of_a_batch_do_not_meet(self, checkpoint: FamilyCheckpoint) -> None:
        """Three prompts of different lengths, generated side by side, get the tokens that the oracle gives to each."""
        prompts = [self.prompt(checkpoint, num_tokens, seed=num_tokens) for num_tokens in (17, 1, 5)]
        expected = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(6):
                tokens.append(int(checkpoint.compute(tokens)[0][-1].argmax()))
            expected.append(tokens[len(prompt) :])
        assert self.harness(checkpoint).generate(prompts, 6) == expected

    def test_embeddings_are_what_enters_the_first_layer(self, checkpoint: FamilyCheckpoint) -> None:
        """Scaled, where the model scales them."""
        ids = self.prompt(checkpoint)
        embedded = self.harness(checkpoint).model.embed(torch.tensor(ids))
        assert embedded.shape[0] == len(ids)
        self.assert_close(embedded, self.embeddings(checkpoint, ids))

    def embeddings(self, checkpoint: FamilyCheckpoint, token_ids: Sequence[int]) -> torch.Tensor:
        """The oracle's. Override it where positions are added to them, as drafters want tokens alone."""
        return checkpoint.compute(token_ids)[1][0]

    def test_embeddings_take_the_place_of_token_ids(self, checkpoint: FamilyCheckpoint) -> None:
        """Given what `embed` makes of a prompt, the model computes what it computes of the prompt."""
        harness, prompt = self.harness(checkpoint), self.prompt(checkpoint)
        inputs = harness.plan([(0, prompt, 0)])
        with torch.inference_mode():
            embeddings = harness.model.embed(torch.tensor(prompt))
            hidden = harness.model.forward(replace(inputs, input_ids=None, embeddings=embeddings)).hidden
            self.assert_close(harness.model.compute_logits(hidden), checkpoint.compute(prompt)[0])

    def test_layers_are_computed_once_and_in_order(self, checkpoint: FamilyCheckpoint) -> None:
        """Each attention layer is computed once, in order of its id."""
        harness = self.harness(checkpoint, backend_class=CountedAttention)
        CountedAttention.order.clear()
        harness.logits(self.prompt(checkpoint, 4))
        assert CountedAttention.order == [layer.layer.layer_id for layer in harness.context.attention_layers]
        assert CountedAttention.order == list(range(self.size(checkpoint).num_layers))

    # --- ranks ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("tensor_parallel", [2, 4])
    def test_ranks_together_equal_the_oracle(self, checkpoint: FamilyCheckpoint, tensor_parallel: int) -> None:
        """On every rank the whole vocabulary, with key heads that are shared out and key heads that are copied."""
        self.require(tensor_parallel=tensor_parallel)
        if reasons := self.check(checkpoint.config, tensor_parallel):
            pytest.skip(f"{self.plugin.__name__}: {' '.join(reasons)}")
        prompt = self.prompt(checkpoint)

        def work(communicator: Communicator) -> torch.Tensor:
            return self.harness(checkpoint, communicator=communicator).logits(prompt, chunk=11)

        expected = checkpoint.compute(prompt)[0]
        for logits in run_in_threads(tensor_parallel, work):
            self.assert_close(logits, expected)

    def test_stages_together_equal_the_oracle(self, checkpoint: FamilyCheckpoint) -> None:
        """A model that is cut behind its first layer, and one that is cut before its last; refused, where the family
        does not declare `stages`."""
        num_layers, prompt = self.size(checkpoint).num_layers, self.prompt(checkpoint)
        if not self.plugin.capabilities.stages:
            with pytest.raises(ModelError):
                self.harness(checkpoint, layers=range(1), is_last_stage=False)
            return
        for cut in sorted({1, num_layers - 1}):
            first = self.harness(checkpoint, layers=range(cut), is_last_stage=False)
            last = self.harness(checkpoint, layers=range(cut, num_layers), is_first_stage=False)
            built = [len(stage.context.attention_layers) for stage in (first, last)]
            assert built == [cut, num_layers - cut], "attention layers of two stages"
            inputs = first.plan([(0, prompt, 0)])
            last.plan([(0, prompt, 0)])
            with torch.inference_mode():
                between = first.model.forward(inputs).hidden
                hidden = last.model.forward(replace(inputs, input_ids=None, stage_input=between)).hidden
                self.assert_close(last.model.compute_logits(hidden), checkpoint.compute(prompt)[0])

    # --- weights -------------------------------------------------------------------------------------------

    def test_some_weights_are_loaded_and_the_others_kept(self, checkpoint: FamilyCheckpoint) -> None:
        """One tensor of the checkpoint after the other: the model then computes what one with these weights from the
        start computes."""
        harness, prompt = self.harness(checkpoint), self.prompt(checkpoint)
        weights = dict(checkpoint.weights)
        for name in sorted(weights)[:: max(1, len(weights) // 6)]:
            weights[name] = 0.7 * weights[name] + 0.01
            harness.model.load_weights([(name, weights[name])], partial=True)
            fresh = self.harness(replace(checkpoint, weights=weights))
            assert torch.equal(harness.logits(prompt), fresh.logits(prompt)), f"after {name}"

    def test_some_weights_of_another_model_are_refused(self, checkpoint: FamilyCheckpoint) -> None:
        """The error lists the names of unknown weights."""
        harness = self.harness(checkpoint)
        with pytest.raises(ModelError) as refusal:
            harness.model.load_weights([("unknown.weight", torch.ones(2, 2))], partial=True)
        assert "unknown.weight" in str(refusal.value)

    # --- declarations --------------------------------------------------------------------------------------

    def test_rows_do_not_depend_on_the_batch(self, checkpoint: FamilyCheckpoint) -> None:
        """Where the family declares it: the same bits alone, among others, and in chunks."""
        self.require("batch_invariant")
        prompts = [self.prompt(checkpoint, num_tokens, seed=num_tokens) for num_tokens in (19, 33, 2)]
        harness = self.harness(checkpoint, batch_invariant=True)
        together = harness.step([(number, prompt, 0) for number, prompt in enumerate(prompts)])
        start = 0
        for prompt in prompts:
            rows = together[start : start + len(prompt)]
            start += len(prompt)
            for chunk in (len(prompt), 5):
                alone = [harness.step([(3, prompt[i : i + chunk], i)]) for i in range(0, len(prompt), chunk)]
                assert torch.equal(torch.cat(alone), rows)
            logits = torch.cat([harness.model.compute_logits(row[None]) for row in rows])
            assert torch.equal(harness.model.compute_logits(rows), logits)

    def test_states_between_the_layers_are_given(self, checkpoint: FamilyCheckpoint) -> None:
        """Where the family declares it: what enters each layer, with the last hidden states."""
        self.require("hidden_layers")
        harness, prompt = self.harness(checkpoint), self.prompt(checkpoint)
        states = checkpoint.compute(prompt)[1]
        with torch.inference_mode():
            for layers in ((0,), tuple(range(len(states))), (len(states) - 1, len(states))):
                outputs = harness.model.forward(replace(harness.plan([(0, prompt, 0)]), layers=layers))
                assert torch.equal(outputs.hidden, harness.step([(1, prompt, 0)]))
                between = outputs.layer_states
                assert between is not None
                parts = between.chunk(len(layers), dim=1)
                assert len(parts) == len(layers)
                for layer, part in zip(layers, parts, strict=True):
                    if layer < len(states):
                        self.assert_close(part, states[layer])

    def test_layers_are_left_out_as_asked(self, checkpoint: FamilyCheckpoint) -> None:
        """Where the family declares it: without the last layers, what enters them goes to the final norm at once."""
        self.require("skips_layers")
        harness, prompt = self.harness(checkpoint), self.prompt(checkpoint)
        states = checkpoint.compute(prompt)[1]
        num_layers = self.size(checkpoint).num_layers
        with torch.inference_mode():
            for first in range(num_layers):
                inputs = harness.plan([(0, prompt, 0)])
                some, every = frozenset(range(first, num_layers)), frozenset(range(num_layers))
                found = harness.model.forward(replace(inputs, skipped_layers=some)).hidden.clone()
                entering = states[first].to(found.dtype).clone()
                bare = replace(inputs, input_ids=None, embeddings=entering, skipped_layers=every)
                self.assert_close(found, harness.model.forward(bare).hidden)

    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_adapters_equal_merged_weights(self, checkpoint: FamilyCheckpoint, num_ranks: int) -> None:
        """Where the family declares it: requests with an adapter, with another one and with none, in one batch, get
        what models get that have the adapter in their weights."""
        self.require("adapters", tensor_parallel=num_ranks)
        if reasons := self.check(checkpoint.config, num_ranks):
            pytest.skip(f"{self.plugin.__name__}: {' '.join(reasons)}")
        prompts = [self.prompt(checkpoint, num_tokens, seed=num_tokens) for num_tokens in (9, 1, 5, 9)]
        adapters = [random_adapter(self.adapted(checkpoint), rank, seed=rank) for rank in (4, 1)]

        def work(communicator: Communicator) -> Sequence[torch.Tensor]:
            harness = self.harness(checkpoint, communicator=communicator, adapters=self.space())
            found = self.hidden_states(harness, prompts, [1, -1, 0, 0], adapters)
            return torch.split_with_sizes(found, [len(prompt) for prompt in prompts])

        weights = [merged(checkpoint.weights, adapter) for adapter in adapters]
        alone = [
            self.harness(replace(checkpoint, weights=given)).step([(0, prompt, 0)])
            for given, prompt in zip((weights[1], checkpoint.weights, weights[0], weights[0]), prompts, strict=True)
        ]
        bare = self.harness(checkpoint).step([(0, prompts[0], 0)])
        assert not torch.allclose(bare, alone[0], rtol=0, atol=100 * self.tolerance), "adapters that change nothing"
        for found in run_in_threads(num_ranks, work):
            for own, expected in zip(found, alone, strict=True):
                self.assert_close(own, expected)

    def test_adapters_end_with_their_pass(self, checkpoint: FamilyCheckpoint) -> None:
        """Where the family declares it: the next pass has none, unless it has its own."""
        self.require("adapters")
        harness, prompt = self.harness(checkpoint, adapters=self.space()), self.prompt(checkpoint)
        before = harness.step([(0, prompt, 0)])
        self.hidden_states(harness, [prompt], [0], [random_adapter(self.adapted(checkpoint), 4, seed=4)])
        assert torch.equal(harness.step([(0, prompt, 0)]), before), "adapters of an earlier pass"

    def space(self) -> AdapterSpace:
        """Slots for the adapters of a harness."""
        return AdapterSpace(2, 4, torch.float32, torch.device("cpu"))

    def adapted(self, checkpoint: FamilyCheckpoint) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's matrices in numbered layers, by name, without those of `unadapted`."""
        matrices = {name: tensor for name, tensor in checkpoint.weights.items() if tensor.dim() == 2}
        return {
            name.removesuffix(".weight"): tuple(tensor.shape)
            for name, tensor in matrices.items()
            if re.search(r"\.\d+\..*\.weight$", name) and not any(re.fullmatch(one, name) for one in self.unadapted)
        }

    def hidden_states(
        self,
        harness: ModelHarness,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        adapters: Sequence[Mapping[str, LowRank]],
    ) -> torch.Tensor:
        """The last hidden states of prompts with the adapters of these slots."""
        space = harness.context.adapters
        assert space is not None
        for slot, adapter in enumerate(adapters):
            space.load(slot, adapter)
        inputs = harness.plan([(number, prompt, 0) for number, prompt in enumerate(prompts)])
        rows = [slot for slot, prompt in zip(slots, prompts, strict=True) for _ in prompt]
        adapted = replace(inputs, adapters=AdapterRows(slots=torch.tensor(rows, dtype=torch.int32)))
        with torch.inference_mode():
            return harness.model.forward(adapted).hidden

    def test_quantization_is_taken_as_declared(self, checkpoint: FamilyCheckpoint) -> None:
        """A method is asked for the linear layers, or refused."""
        method = AskedMethod()
        if not self.plugin.capabilities.quantization:
            with pytest.raises(ModelError):
                self.harness(checkpoint, quantization=method)
            return
        self.harness(checkpoint, quantization=method)
        assert len(method.shapes) >= 2 * self.size(checkpoint).num_layers, "layers that no method was asked for"
        assert len({shape.name for shape in method.shapes}) == len(method.shapes), "names that come twice"

    def test_operators_are_taken_as_declared(self, checkpoint: FamilyCheckpoint) -> None:
        """The model asks its context's operators for norms, activations or rotations."""
        self.require("operators")
        if not self.needs_operators:
            pytest.skip(f"{self.model_type} has nothing that operators compute")
        operators = CountingOperators()
        self.harness(checkpoint, operators=operators).logits(self.prompt(checkpoint, 4))
        assert operators.names, "operators are declared, but none was used"

    def test_the_size_is_that_of_the_model(self, checkpoint: FamilyCheckpoint) -> None:
        """Parameters, layers, heads, vocabulary and the longest sequence."""
        size, harness = self.size(checkpoint), self.harness(checkpoint)
        assert size.num_parameters == checkpoint.num_parameters
        assert size.max_model_len == self.max_model_len
        layers = [module.layer for module in harness.context.attention_layers]
        assert size.num_layers == len(layers)
        assert (size.num_kv_heads, size.head_size) == (layers[0].num_kv_heads, layers[0].head_size)
        assert harness.logits([3]).shape == (1, size.vocab_size)
        assert harness.step([(0, [3], 0)]).shape == (1, size.hidden_size)
        assert against_size(self.plugin.__name__, size, harness.model, harness.context) == []

    # --- refusals ------------------------------------------------------------------------------------------

    def test_check_takes_what_is_served(self, checkpoint: FamilyCheckpoint) -> None:
        """`check` accepts served configs, and refuses others in sentences."""
        assert self.check(checkpoint.config) == []
        reasons = self.check({**checkpoint.config, "architectures": ["UnknownForCausalLM"], "model_type": "unknown"})
        assert reasons, "it has no reason against an unknown architecture"
        assert all(reason.strip() for reason in reasons)

    def test_inputs_that_it_cannot_take_are_refused(self, checkpoint: FamilyCheckpoint) -> None:
        """Adapters of modules that were made without a space for them, and states between layers of families that give
        none."""
        harness = self.harness(checkpoint)
        refused: list[dict[str, Any]] = [{"adapters": AdapterRows(slots=torch.tensor([-1], dtype=torch.int32))}]
        if not self.plugin.capabilities.hidden_layers:
            refused.append({"layers": (0,)})
        for changes in refused:
            with pytest.raises(ModelError):
                harness.model.forward(replace(harness.plan([(0, [3], 0)]), **changes))

    def test_a_missing_tensor_is_refused(self, checkpoint: FamilyCheckpoint) -> None:
        """Each missing tensor is refused by its name."""
        for name in sorted(checkpoint.weights)[:: max(1, len(checkpoint.weights) // 4)]:
            left = {other: tensor for other, tensor in checkpoint.weights.items() if other != name}
            with pytest.raises(ModelError) as refusal:
                ModelHarness(self.family(), checkpoint.config, left.items(), PlainLatentAttention)
            assert str(refusal.value).strip()


def _model_type(architecture: str) -> str:
    """What transformers calls the type of an architecture's config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = {name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    if architecture not in names:
        raise ValueError(f"transformers does not know {architecture}: set model_type, or override create_checkpoint")
    return names[architecture]


__all__ = ["FamilyCheckpoint", "ModelFamilySuite"]
