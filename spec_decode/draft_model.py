"""Draft model: a smaller model guesses the target's next tokens.

Leviathan et al. 2023 (arXiv 2211.17192), section 2; Chen et al. 2023 (arXiv 2302.01318). The draft model may be of any
family and format that the host can load. Its keys and values are in the same blocks as the target's. With the option
`vocabulary` it may have another tokenizer than the target (see `shared_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.errors import ModelError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import ModelInputs
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftRequest,
    KeepsLayers,
    LayerSetup,
    LoadsModel,
    ReadsTokenizer,
    SpeculationNeed,
)
from dovetail.nn.host_copies import on_device
from dovetail.spec_decode.chains import Chains
from dovetail.spec_decode.shared_tokens import SharedTokens, Vocabulary, mean_rows, read_vocabulary


class DraftModelOptions(PluginOptions):
    """The draft model, as in the config's section `model`, and how long it drafts."""

    path: str = Field(min_length=1)
    """`./dir`, `file.gguf`, `org/name` or `scheme:reference`."""
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | dict[str, Any] | None = "auto"
    family: str | dict[str, Any] = "auto"
    weight_format: str | dict[str, Any] = "auto"
    source: str | dict[str, Any] = "auto"
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    stop_below: float = Field(default=0.0, ge=0, lt=1)
    """A chain ends before the product of the draft model's highest probabilities (at temperature 1) falls below this;
    0: every chain has the greatest length."""
    vocabulary: Literal["same", "shared_tokens"] = "same"
    """same: the draft model's tokens must be the target's. shared_tokens: it may have another tokenizer, and guesses
    tokens that both have."""


class DraftModelDrafter(LoadsModel, KeepsLayers, ReadsTokenizer):
    """Runs the draft model over the tokens that the target computed, then token by token, all requests in one batch."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = DraftModelOptions
    capabilities = DraftCapabilities(tensor_parallel=None, probabilities=True, confidence=True)
    options: DraftModelOptions

    @classmethod
    def model_section(cls, options: DraftModelOptions) -> Mapping[str, Any]:
        """Returns the options of the model."""
        # Not those of a class that derives from these options.
        return options.model_dump(include=DraftModelOptions.model_fields.keys() - {"stop_below", "vocabulary"})

    @classmethod
    def reads_tokenizer(cls, options: DraftModelOptions) -> bool:
        """Returns whether the two vocabularies may differ."""
        return options.vocabulary == "shared_tokens"

    @classmethod
    def caches(cls, options: DraftModelOptions, need: SpeculationNeed) -> Sequence[KVSpec]:
        """Returns one entry per layer, as if none had a window."""
        assert need.model is not None
        size = need.model.size
        return [size.cache(need.kv_dtype)] * size.num_layers

    @classmethod
    def check(cls, need: SpeculationNeed, options: DraftModelOptions, environment: Environment) -> list[str]:
        """Refuses a model whose token ids differ from the target's, unless the options allow it."""
        if need.model is None:
            return ["the host found no draft model."]
        if options.vocabulary == "shared_tokens":
            if need.has_tokenizer_json:
                return []
            return [
                "vocabulary: shared_tokens reads tokenizers in the form of tokenizer.json, which the target has not: "
                "set model.tokenizer to a directory with tokenizer.json."
            ]
        what_to_do = "choose a draft model of the target's own family, or set vocabulary to shared_tokens."
        vocab_size = need.model.size.vocab_size
        if vocab_size != need.vocab_size:
            return [
                f"the draft model {options.path!r} has a vocabulary of {vocab_size} tokens, the target one of "
                f"{need.vocab_size}: {what_to_do}"
            ]
        difference = need.model.vocabulary_difference
        if difference is not None:
            return [f"the draft model {options.path!r} has another tokenizer: {difference}; {what_to_do}"]
        return []

    def __init__(self, options: DraftModelOptions, setup: LayerSetup):
        super().__init__(options, setup)
        assert setup.model is not None
        self._module = setup.model.module
        self._max_len = setup.model.max_model_len
        self._shared = self._shared_tokens() if options.vocabulary == "shared_tokens" else None
        self._right: dict[int, int] = {}
        """By seq_id, how many positions behind those that the target had computed hold the right keys and values
        already: those of the last known token and of the accepted draft tokens. Empty but between `on_verified` and
        `propose`."""

    def _shared_tokens(self) -> SharedTokens:
        assert self.setup.model is not None
        model, vocab_size = self.setup.model, self.setup.vocab_size
        own = self._vocabulary("draft model", model.tokenizer_json, model.vocab_size)
        target = self._vocabulary("target", self.setup.tokenizer_json, vocab_size)
        shared = SharedTokens(target, own, vocab_size, self.setup.device)
        if not shared.num_shared:
            raise ModelError(
                f"the draft model {self.options.path!r} and the target have no token in common, so that it could guess "
                "nothing: choose another draft model"
            )
        return shared

    def _vocabulary(self, whose: str, tokenizer_json: str | None, size: int) -> Vocabulary:
        if tokenizer_json is None:
            raise ModelError(
                f"vocabulary: shared_tokens needs the tokenizers of both models, and the {whose} has none in the form "
                "of tokenizer.json: put the file next to its weights"
            )
        return read_vocabulary(tokenizer_json, size)

    def attention_layers(self) -> Sequence[AttentionModule]:
        assert self.setup.model is not None
        return self.setup.model.layers

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        # The last draft was never an input, so its own position is empty.
        self._right[seq_id] = 1 + min(len(accepted), num_drafted - 1)

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._right.pop(seq_id, None)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        limits = [self._most_drafts(request) for request in batch.requests]
        logits = self._catch_up(batch.requests, limits)
        self._right.clear()
        drafting = [i for i, limit in enumerate(limits) if limit > 0]
        chains = Chains([batch.requests[i] for i in drafting], [limits[i] for i in drafting])
        while logits is not None:
            chains.extend(self.setup, logits, self.options.stop_below, self._target_ids)
            logits = self._step(chains) if len(chains.active) else None
        drafts: list[Draft | None] = [None] * len(limits)
        for i, index in enumerate(drafting):
            drafts[index] = chains.draft(i)
        return drafts

    @property
    def _target_ids(self) -> torch.Tensor | None:
        """The target's ids of the columns that `_logits` returns; None: the columns are these ids."""
        return None if self._shared is None else self._shared.target_ids

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._module.compute_logits(hidden)
        return logits if self._shared is None else logits.index_select(1, self._shared.own_ids)

    def _most_drafts(self, request: DraftRequest) -> int:
        """Most draft tokens that the request can use and the model has positions for: with k of them the last input is
        at position n + k - 2."""
        return max(0, min(request.max_drafts, self._max_len + 1 - len(request.token_ids)))

    def _catch_up(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> torch.Tensor | None:
        """Computes the tokens that the target computed in this step, and the last known token of requests that draft.
        Returns the logits after the latter; None where no request drafts."""
        seq_ids: list[int] = []
        starts: list[int] = []
        inputs: list[np.ndarray] = []
        last: list[int] = []
        num_tokens = 0
        for request, limit in zip(requests, limits, strict=True):
            start = request.first_position + self._right.get(request.seq_id, 0)
            end = len(request.token_ids) if limit else request.first_position + len(request.hidden_rows)
            end = min(end, self._max_len)
            if start < end:
                seq_ids.append(request.seq_id)
                starts.append(start)
                inputs.append(request.token_ids[start:end])
                num_tokens += end - start
                if limit:
                    last.append(num_tokens - 1)
        if not seq_ids:
            return None
        counts = np.array([len(tokens) for tokens in inputs])
        hidden = self._forward(seq_ids, np.array(starts), counts, np.concatenate(inputs).astype(np.int64))
        if not last:
            return None
        wanted = hidden if len(last) == len(hidden) else hidden[torch.tensor(last, device=hidden.device)]
        return self._logits(wanted)

    def _step(self, chains: Chains) -> torch.Tensor:
        """Logits after the last token of each active chain."""
        starts = chains.last_positions
        return self._logits(self._forward(chains.active_seq_ids, starts, np.ones_like(starts), chains.last_tokens))

    def _forward(
        self, seq_ids: Sequence[int], starts: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> torch.Tensor:
        """Last hidden states of int64 `tokens`, flat over requests."""
        where = on_device(self.setup.pages.plan(seq_ids, starts, counts), self.setup.device)
        return self._module.forward(self._inputs(tokens, where)).hidden

    def _inputs(self, tokens: np.ndarray, positions: torch.Tensor) -> ModelInputs:
        """The target's tokens as the model reads them."""
        device = self.setup.device
        if self._shared is None:
            return ModelInputs(input_ids=on_device(tokens, device), positions=positions)
        pieces, counts = self._shared.read(tokens)
        ids = on_device(pieces, device)
        if len(pieces) == len(tokens):
            return ModelInputs(input_ids=ids, positions=positions)
        return ModelInputs(embeddings=mean_rows(self._module.embed(ids), counts), positions=positions)
