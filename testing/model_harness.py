"""Runs one model over an attention backend without an engine: for tests of model families and of backends.

Requests get blocks that are neither contiguous nor in order, so that whatever ignores the block table fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch, AttentionModule, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import CausalLM, ModelFamily, ModelInputs
from dovetail.contracts.operators import Operators
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.nn import AdapterSpace, BuildContext, Communicator, SingleProcess
from dovetail.nn.operators import torch_operators


def without_pages(batch: AttentionBatch) -> AttentionBatch:
    """The step as it is for layers that keep nothing."""
    return replace(batch, block_table=batch.block_table[:, :0], slot_mapping=batch.slot_mapping[:0])


class ModelHarness:
    """A family's model over paged KV, driven by hand."""

    def __init__(
        self,
        family: ModelFamily,
        config: Mapping[str, Any],
        weights: Iterable[tuple[str, torch.Tensor]],
        backend_class: type[AttentionBackend],
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = 128,
        block_size: int = 4,
        max_num_seqs: int = 4,
        communicator: Communicator | None = None,
        quantization: QuantizationMethod | None = None,
        operators: Operators | None = None,
        batch_invariant: bool = False,
        layers: range | None = None,
        is_first_stage: bool = True,
        is_last_stage: bool = True,
        adapters: AdapterSpace | None = None,
    ):
        dtype_name = str(dtype).removeprefix("torch.")
        self.context = BuildContext(
            dtype,
            torch.device("cpu"),
            max_model_len,
            dtype_name,
            communicator or SingleProcess(),
            quantization,
            batch_invariant,
            operators or torch_operators(),
            layers=layers,
            is_first_stage=is_first_stage,
            is_last_stage=is_last_stage,
            adapters=adapters,
        )
        self.model: CausalLM = family.create(config, self.context)
        self.model.load_weights(weights)
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._blocks_per_seq = -(-max_model_len // block_size)
        self._num_blocks = 1 + max_num_seqs * self._blocks_per_seq
        shuffled = np.random.default_rng(0).permutation(np.arange(1, self._num_blocks, dtype=np.int32))
        self._block_table = shuffled.reshape(max_num_seqs, self._blocks_per_seq)
        groups: dict[KVSpec, list[AttentionModule]] = {}
        for attention in self.context.attention_layers:
            groups.setdefault(attention.cache, []).append(attention)
        self._backends = [self._bind(spec, layers, backend_class, dtype_name) for spec, layers in groups.items()]

    def _bind(
        self, spec: KVSpec, layers: Sequence[AttentionModule], backend_class: type[AttentionBackend], dtype: str
    ) -> AttentionBackend:
        setup = AttentionSetup(
            layers=tuple(attention.layer for attention in layers),
            spec=spec,
            block_size=self.block_size,
            dtype=dtype,
            device="cpu",
            max_num_seqs=len(self._block_table),
            max_num_batched_tokens=len(self._block_table) * self.max_model_len,
            max_model_len=self.max_model_len,
        )
        backend = backend_class(backend_class.Options(), setup)
        for attention in layers:
            shape = (0,) if backend.setup.keeps_nothing else backend.kv_cache_shape(self._num_blocks)
            attention.bind(backend, torch.zeros(shape, dtype=self.context.dtype))
        return backend

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        """Computes (sequence number, its next tokens, tokens computed before) for each row in one batch; returns
        the last hidden states of all tokens, flat."""
        return self.model.forward(self.plan(rows)).hidden

    def plan(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> ModelInputs:
        """Prepares the attention backends for `step`; its token ids and positions."""
        query_lens = np.array([len(tokens) for _, tokens, _ in rows], dtype=np.int32)
        computed = np.array([start for _, _, start in rows], dtype=np.int32)
        positions = np.concatenate([np.arange(start, start + len(tokens)) for _, tokens, start in rows])
        table = self._block_table[[number for number, _, _ in rows]]
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)
        slots = table[row_of_token, positions // self.block_size] * self.block_size + positions % self.block_size
        batch = AttentionBatch(
            query_start=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
            seq_lens=(computed + query_lens).astype(np.int32),
            block_table=table,
            slot_mapping=slots.astype(np.int64),
            max_query_len=int(query_lens.max()),
            max_seq_len=int((computed + query_lens).max()),
        )
        for backend in self._backends:
            backend.plan(without_pages(batch) if backend.setup.keeps_nothing else batch)
        token_ids = torch.tensor([token for _, tokens, _ in rows for token in tokens], dtype=torch.int64)
        return ModelInputs(input_ids=token_ids, positions=torch.from_numpy(positions.astype(np.int64)))

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """[T, vocab_size] for a whole sequence, computed `chunk` tokens at a time (None: at once)."""
        chunk = chunk or len(token_ids)
        starts = range(0, len(token_ids), chunk)
        hidden = [self.step([(0, token_ids[start : start + chunk], start)]) for start in starts]
        return self.model.compute_logits(torch.cat(hidden))

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of several prompts, decoded together."""
        outputs: list[list[int]] = [[] for _ in prompts]
        pending = [(number, list(prompt), 0) for number, prompt in enumerate(prompts)]
        for _ in range(num_tokens):
            hidden = self.step(pending)
            last = np.cumsum([len(tokens) for _, tokens, _ in pending]) - 1
            chosen = self.model.compute_logits(hidden[torch.from_numpy(last)]).argmax(dim=-1).tolist()
            for output, token in zip(outputs, chosen, strict=True):
                output.append(token)
            pending = [
                (number, [token], start + len(tokens))
                for (number, tokens, start), token in zip(pending, chosen, strict=True)
            ]
        return outputs
