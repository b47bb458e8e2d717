"""A weight format that makes up its tensors: a Llama of any size without a checkpoint."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import ModelFiles, TensorInfo, TokenizerFiles, WeightFormat, WeightReader


class RandomReader(WeightReader):
    """Tensors cut from one pool of random numbers; norms are ones."""

    def __init__(self, config: Mapping[str, Any]):
        self._shapes = dict(_shapes(config))
        self._dtype: torch.dtype = getattr(torch, config["torch_dtype"])
        generator = torch.Generator().manual_seed(0)
        self._pool = (torch.randn(1 << 22, generator=generator) * 0.02).to(self._dtype)

    def infos(self) -> Sequence[TensorInfo]:
        """As the config implies them."""
        name = str(self._dtype).removeprefix("torch.")
        return [
            TensorInfo(key, shape, name, math.prod(shape) * self._dtype.itemsize) for key, shape in self._shapes.items()
        ]

    def read(self, name: str) -> torch.Tensor:
        """The same in every run. Each name starts at a place of its own in the pool, so that small tensors differ."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        count = math.prod(shape)
        pool = self._pool.roll(-(zlib.crc32(name.encode()) % len(self._pool)))
        return pool.repeat(-(-count // len(pool)))[:count].view(shape)


class RandomWeights(WeightFormat):
    """Reads config.json and nothing else."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, options: PluginOptions):
        super().__init__(options)

    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        """Never: it has to be named."""
        return False

    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        """config.json."""
        config: dict[str, Any] = json.loads((files.path / "config.json").read_text())
        return config

    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        """None."""
        return None

    def open(self, files: ModelFiles) -> WeightReader:
        """The pool."""
        return RandomReader(self.config(files))


def _shapes(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes += [
            (f"{layer}.self_attn.q_proj.weight", (queries, hidden)),
            (f"{layer}.self_attn.k_proj.weight", (keys, hidden)),
            (f"{layer}.self_attn.v_proj.weight", (keys, hidden)),
            (f"{layer}.self_attn.o_proj.weight", (hidden, queries)),
            (f"{layer}.mlp.gate_proj.weight", (inner, hidden)),
            (f"{layer}.mlp.up_proj.weight", (inner, hidden)),
            (f"{layer}.mlp.down_proj.weight", (hidden, inner)),
            (f"{layer}.input_layernorm.weight", (hidden,)),
            (f"{layer}.post_attention_layernorm.weight", (hidden,)),
        ]
    return [*shapes, ("model.norm.weight", (hidden,)), ("lm_head.weight", (vocab, hidden))]
