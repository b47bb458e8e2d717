"""BERT and RoBERTa: encoders, whose tokens see their whole sequence, and which give hidden states and no logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import (
    CausalLM,
    ModelCapabilities,
    ModelFamily,
    ModelInputs,
    ModelNeed,
    ModelOutputs,
    ModelSize,
    ScoresStates,
)
from dovetail.contracts.plugin import Environment
from dovetail.contracts.weights import PackedTensor
from dovetail.nn import (
    ColumnLinear,
    EncoderAttention,
    LayerNorm,
    ModelContext,
    QKVLinear,
    ReplicatedLinear,
    RowLinear,
    VocabEmbedding,
    WeightHolder,
    WeightRules,
    activation,
    check_inputs,
    check_whole,
    load_weights,
)
from dovetail.nn.hf_config import Config, required
from dovetail.nn.planning import planned_size, reasons_against

_ROBERTA = (
    *("RobertaModel", "RobertaForSequenceClassification"),
    *("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
)
_CLASSIFIES = "ForSequenceClassification"
_RULES = WeightRules(
    renamed=(
        (r"^(bert|roberta)\.", ""),
        (r"\.gamma$", ".weight"),  # of TensorFlow's checkpoints
        (r"\.beta$", ".bias"),
    ),
    ignored=(r"embeddings\.(position_ids|token_type_ids)",),
)
_RULES_WITHOUT_HEAD = replace(_RULES, ignored=(*_RULES.ignored, r"pooler\..*"))
"""What BertModel computes besides the hidden states is not asked for."""


class BertFamily(ModelFamily):
    """Encoders with post-norm layers, learned positions and token types (Devlin et al. 2018, arXiv 1810.04805)."""

    contract = (1, 7)
    capabilities = ModelCapabilities(tensor_parallel=None, quantization=True, batch_invariant=True)
    stability = "provisional"
    preference: ClassVar[int] = 10
    architectures = ("BertModel", "BertForSequenceClassification", *_ROBERTA)

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        positions = int(required(config, "max_position_embeddings")) - _first_position(config)
        size = planned_size(create, config, positions)
        return replace(size, num_token_types=_num_types(config), num_labels=_num_labels(config))

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the encoder for config's architecture."""
        return create(config, context)


def create(config: Mapping[str, Any], context: ModelContext) -> BertEncoder:
    """The module for one of `BertFamily.architectures`."""
    architecture = required(config, "architectures")[0]
    if architecture not in BertFamily.architectures:
        raise ModelError(f"{architecture} is none of {', '.join(BertFamily.architectures)}")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ModelError("is_decoder and add_cross_attention are not served: the family builds encoders")
    if (kind := config.get("position_embedding_type", "absolute")) not in ("absolute", None):
        raise ModelError(
            f"position_embedding_type = {kind!r} is not served: positions are added to the embeddings here"
        )
    check_whole(context, "bert")
    return BertClassifier(context, config) if _num_labels(config) else BertEncoder(context, config)


def _first_position(config: Config) -> int:
    """Row of the position table that the first token gets: RoBERTa counts from behind the padding token's id."""
    is_roberta = required(config, "architectures")[0] in _ROBERTA
    return int(config.get("pad_token_id") or 0) + 1 if is_roberta else 0


def _num_labels(config: Config) -> int:
    """Of the score head; 0: there is none."""
    if not required(config, "architectures")[0].endswith(_CLASSIFIES):
        return 0
    named = config.get("id2label")
    return len(named) if named else int(config.get("num_labels") or 2)


def _num_types(config: Config) -> int:
    return int(config.get("type_vocab_size") or 2)


class Table(WeightHolder):
    """Embeddings that every rank holds whole."""

    def __init__(self, context: ModelContext, name: str, num_rows: int, hidden_size: int):
        super().__init__()
        self.weight = context.empty(num_rows, hidden_size)
        self._name = f"{name}.weight"
        self._shape = (num_rows, hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size]."""
        return self.weight.index_select(0, rows)  # as in `nn.embedding`

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Every rank keeps all of it."""
        self.weight.copy_(tensor)


class BertLayer(torch.nn.Module):
    """x = norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, context: ModelContext, config: Config, name: str):
        super().__init__()
        hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
        if hidden_size % num_heads:
            raise ModelError(f"the hidden size {hidden_size} does not divide by {num_heads} heads")
        wide, size = int(required(config, "intermediate_size")), hidden_size // num_heads
        eps = float(config.get("layer_norm_eps") or 1e-12)
        own, after = f"{name}.attention.self", f"{name}.attention.output"
        names = (f"{own}.query", f"{own}.key", f"{own}.value")
        self.qkv = QKVLinear(context, f"{own}.qkv", hidden_size, num_heads, num_heads, size, names, bias=True)
        heads = self.qkv.num_heads
        self.attention = EncoderAttention(context, heads, heads, size, size**-0.5)
        self.attention_output = RowLinear(context, f"{after}.dense", hidden_size, hidden_size, bias=True)
        self.attention_norm = LayerNorm(context, f"{after}.LayerNorm", hidden_size, eps)
        self.intermediate = ColumnLinear(context, f"{name}.intermediate.dense", hidden_size, wide, bias=True)
        self.output = RowLinear(context, f"{name}.output.dense", wide, hidden_size, bias=True)
        self.output_norm = LayerNorm(context, f"{name}.output.LayerNorm", hidden_size, eps)
        self._activation = activation(str(config.get("hidden_act") or "gelu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        heads = (-1, self.qkv.num_heads, self.qkv.head_size)
        attended = self.attention(*(part.unflatten(-1, heads[1:]) for part in (query, key, value)))
        x = self.attention_norm(x + self.attention_output(attended))
        normed: torch.Tensor = self.output_norm(x + self.output(self._activation(self.intermediate(x))))
        return normed


class BertEncoder(torch.nn.Module):
    """The whole encoder; a `CausalLM` without logits."""

    rules: ClassVar[WeightRules] = _RULES_WITHOUT_HEAD

    def __init__(self, context: ModelContext, config: Config):
        super().__init__()
        hidden_size, table = int(required(config, "hidden_size")), "embeddings"
        vocab_size, positions = int(required(config, "vocab_size")), int(required(config, "max_position_embeddings"))
        self.words = VocabEmbedding(context, f"{table}.word_embeddings", vocab_size, hidden_size)
        self.positions = Table(context, f"{table}.position_embeddings", positions, hidden_size)
        self.types = Table(context, f"{table}.token_type_embeddings", _num_types(config), hidden_size)
        self.norm = LayerNorm(context, f"{table}.LayerNorm", hidden_size, float(config.get("layer_norm_eps") or 1e-12))
        num_layers = int(required(config, "num_hidden_layers"))
        self.layers = torch.nn.ModuleList(
            BertLayer(context, config, f"encoder.layer.{index}") for index in range(num_layers)
        )
        self._first_position = _first_position(config)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.embed`, without positions and token types, which `forward` adds."""
        x: torch.Tensor = self.words(input_ids)
        return x

    def forward(self, inputs: ModelInputs) -> ModelOutputs:
        """As `CausalLM.forward`."""
        check_inputs(inputs, takes_token_types=True)
        types = self.types.weight[0] if inputs.token_types is None else self.types(inputs.token_types)
        x = inputs.embeddings
        if x is None:
            assert inputs.input_ids is not None  # check_inputs saw to it
            x = self.embed(inputs.input_ids)
        x = self.norm(x + self.positions(inputs.positions + self._first_position) + types)
        for layer in self.layers:
            x = layer(x)
        return ModelOutputs(hidden=x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises `ModelError`: an encoder has no output layer."""
        raise ModelError("the model is an encoder: it has no logits, and generates nothing; ask for embeddings")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedTensor]], partial: bool = False) -> None:
        """As `CausalLM.load_weights`."""
        load_weights(self, weights, self.rules, partial=partial)


class BertClassifier(BertEncoder, ScoresStates):
    """The encoder with a score head of two layers, which reads the state of the first token."""

    rules = _RULES

    def __init__(self, context: ModelContext, config: Config):
        super().__init__(context, config)
        hidden_size = int(required(config, "hidden_size"))
        is_roberta = required(config, "architectures")[0] in _ROBERTA
        dense, out = ("classifier.dense", "classifier.out_proj") if is_roberta else ("pooler.dense", "classifier")
        self.dense = ReplicatedLinear(context, dense, hidden_size, hidden_size, bias=True)
        self.out = ReplicatedLinear(context, out, hidden_size, _num_labels(config), bias=True)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `ScoresStates.score`."""
        scores: torch.Tensor = self.out(torch.tanh(self.dense(hidden)))
        return scores
