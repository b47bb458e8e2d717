"""The forward pass of an engine as a trainer's: under `reproducibility: strict` both give a token the same log
probability, bit for bit.

    llm = LLM("./my-model", reproducibility="strict", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained("./my-model", dtype=torch.float32)
    training = TrainingForward(llm.engine.config)
    training.load(model.named_parameters())  # again after each step of the optimizer
    log_probs = training.log_probs([(prompt_ids, output_ids)])  # one tensor for each pair
    loss_of(log_probs).backward()  # fills the gradients of the model's parameters

A trainer's kernels round otherwise than an engine's, and the ratio of their log probabilities passes for a change of
the policy. "Bitwise consistent" training computes forward passes with the engine's kernels and only gradients with its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from dovetail.config.layers import LayeredConfig
from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.attention import AttentionBatch, AttentionSetup
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.model import CausalLM, ModelInputs
from dovetail.engine.resolving import resolve
from dovetail.nn.operators import torch_operators
from dovetail.registry.bootstrap import LoadedPlugins, bootstrap
from dovetail.rl.gradients import GradientAttention, GradientContext, GradientOperators
from dovetail.worker.attention_binding import bind_layers
from dovetail.worker.kv_layout import build_layout
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.machine.environment import detect_environment

Scored = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its output."""


class TrainingForward:
    """A model of the engine's parts, over parameters that belong to a trainer.

    Family, operators and attention backend are those of the engine's config. One sequence is computed at a time, on the
    config's device, with torch's own number of threads. Gradients are computed in float32, by formulas that are equal
    to the kernels but for rounding.
    """

    def __init__(self, config: ResolvedConfig):
        """`config`: the engine's, as `LLM.engine.config` has it.

        Raises:
            ConfigError: the config is not strict, quantizes weights, or has several ranks.
            ModelError: the model's attention has parts whose gradients are not known here.
            PluginError: the plugins are not those that the config was resolved with.
        """
        _check(config)
        plugins = bootstrap(config.components(), config.plugin_hash)
        self._device = torch.device(config.device_type)
        self._max_model_len, self._vocab_size = config.model.max_model_len, config.model.vocab_size
        operators = torch_operators() if config.operators is None else plugins.create(config.operators)
        self._context = GradientContext(
            dtype=getattr(torch, config.model.dtype),
            device=self._device,
            max_model_len=self._max_model_len,
            kv_dtype=config.cache.dtype,
            batch_invariant=True,
            operators=GradientOperators(operators),
        )
        self._model: CausalLM = plugins.create(config.model_family).create(config.model.hf_config, self._context)
        self._block_size = config.cache.block_size
        self._num_blocks = -(-self._max_model_len // self._block_size)
        self._backends = self._bind(config, plugins)
        self._is_loaded = False

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self:
        """For an engine in another process: with what its `LLMEngine.from_config` gets. Raises what that raises."""
        return cls(resolve(load_config(config, keywords=keywords, overrides=options)))

    def load(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the parameters as they are now, under the names of the checkpoint: before the first pass, and again
        whenever an optimizer changed them. Gradients of later passes go to these tensors.

        Raises `ModelError` for tensors that are missing, not expected, or of another shape.
        """
        self._is_loaded = False
        self._context.begin_loading()
        self._model.load_weights(iter(parameters))
        self._is_loaded = True

    def log_probs(self, sequences: Iterable[Scored], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """The log probability of each output token, with gradients: for each sequence float32 [tokens of its output].

        `temperature` divides the logits: 1 gives the engine's raw log probabilities, and the rollouts' temperature what
        they were drawn from, before any truncation.

        Raises:
            RequestError: a sequence has no prompt, is longer than the engine's `max_model_len`, or has ids beyond the
                vocabulary.
            ModelError: nothing was loaded.
        """
        if not self._is_loaded:
            raise ModelError("there are no weights yet: call load() with the trainer's parameters first")
        return [self._score(prompt, output, temperature) for prompt, output in sequences]

    def _score(self, prompt: Sequence[int], output: Sequence[int], temperature: float) -> torch.Tensor:
        num_tokens = len(prompt) + len(output)
        if not prompt or num_tokens > self._max_model_len:
            raise RequestError(
                f"a sequence has {len(prompt)} prompt and {len(output)} output tokens: it takes at least one of the"
                f" prompt, and {self._max_model_len} together at most"
            )
        if not output:
            return torch.empty(0, device=self._device)
        if not 0 <= min(*prompt, *output) <= max(*prompt, *output) < self._vocab_size:
            raise RequestError(f"a sequence has token ids that are not in 0 .. {self._vocab_size - 1}")
        ids = torch.tensor([*prompt, *output], device=self._device)
        positions = torch.arange(num_tokens - 1, device=self._device)
        self._plan(num_tokens - 1)
        hidden = self._model.forward(ModelInputs(input_ids=ids[:-1], positions=positions)).hidden
        logits = self._model.compute_logits(hidden[len(prompt) - 1 :])
        scaled = logits.float() if temperature == 1 else logits.float() / temperature
        return scaled.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]

    def _plan(self, num_tokens: int) -> None:
        """One request, whole, in the blocks after the null block."""
        slots = self._block_size + np.arange(num_tokens, dtype=np.int64)
        batch = AttentionBatch(
            query_start=np.array([0, num_tokens], dtype=np.int32),
            seq_lens=np.array([num_tokens], dtype=np.int32),
            block_table=np.arange(1, 1 + self._num_blocks, dtype=np.int32)[None],
            slot_mapping=slots,
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
        )
        for backend in self._backends:
            backend.plan(batch)

    def _bind(self, config: ResolvedConfig, plugins: LoadedPlugins) -> list[GradientAttention]:
        layers = self._context.attention_layers
        layout = build_layout([layer.cache for layer in layers], self._block_size)
        storage = KVStorage(layout, 1 + self._num_blocks, 0, self._device)
        environment = detect_environment(config.device_type)
        backends = []
        for group in layout.groups:
            members = [layers[layer_id] for layer_id in group.layer_ids]
            setup = AttentionSetup(
                layers=tuple(layer.layer for layer in members),
                spec=members[0].cache,
                block_size=self._block_size,
                dtype=config.model.dtype,
                device=str(self._device),
                max_num_seqs=1,
                max_num_batched_tokens=self._max_model_len,
                max_model_len=self._max_model_len,
                batch_invariant=True,
            )
            view = storage.view
            inner = bind_layers(plugins, config.attention, members, setup, environment, view, whose="this model's")
            backend = GradientAttention(inner)
            for index, layer in enumerate(members):
                layer.bind(backend, view(index, setup.spec, inner))
            backends.append(backend)
        return backends


def _check(config: ResolvedConfig) -> None:
    if not config.is_strict:
        raise ConfigError(
            "bits are promised under reproducibility: strict only: set it in the engine's config, or compute with the"
            " trainer's own forward pass"
        )
    if config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization.name!r} rounds the weights, and rounding has no gradient: serve the"
            " model in full precision (quantization: none)"
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"tensor_parallel is {config.tensor_parallel}, and a training pass runs in one process: set it to 1"
        )
