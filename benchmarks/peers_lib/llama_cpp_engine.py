"""llama.cpp through the low-level API of llama-cpp-python. No options: the GGUF file decides."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from .base import MAX_MODEL_LEN, EngineSpec, Prompts, ScoringEngine

_BATCH_TOKENS = 2048


class _Row(NamedTuple):
    token: int
    position: int
    sequence: int
    wanted: bool


@llama_cpp.llama_log_callback
def _silence(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """It reports every tensor that it loads."""


class _Context:
    """KV memory for a number of sequences, and the batch that feeds it.

    Without a unified KV memory each sequence has a stream of its own, which is what llama.cpp does fastest; a prefix
    can be copied between sequences of a unified one only.
    """

    def __init__(self, model: Any, threads: int, num_sequences: int, num_tokens: int, unified: bool):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = _BATCH_TOKENS
        params.n_ubatch = 512
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        self.pointer = llama_cpp.llama_init_from_model(model, params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp made no context for {num_sequences} sequences")
        self.memory = llama_cpp.llama_get_memory(self.pointer)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def decode(self, rows: Sequence[_Row]) -> None:
        """One llama_decode of at most `_BATCH_TOKENS` rows."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index] = row.token
            batch.pos[index] = row.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row.sequence
            batch.logits[index] = row.wanted
        status = llama_cpp.llama_decode(self.pointer, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status}")

    def close(self) -> None:
        """Gives the memory back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self.pointer)


class LlamaCppEngine(ScoringEngine):
    """All prompts in batches of `_BATCH_TOKENS` rows, then one row per sequence and step."""

    def __init__(self, spec: EngineSpec):
        self.version = llama_cpp.__version__
        llama_cpp.llama_log_set(_silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(spec.model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {spec.model}")
        self._threads = spec.threads
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._shape: tuple[int, int, bool] | None = None
        self._current: _Context | None = None

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """A shared prefix is computed once and copied to all sequences."""
        longest = max(len(prompt) for prompt in prompts) + num_tokens
        context = self._context(len(prompts), longest, num_shared)
        llama_cpp.llama_memory_clear(context.memory, False)
        if num_shared:
            context.decode([_Row(token, at, 0, False) for at, token in enumerate(prompts[0][:num_shared])])
            for sequence in range(1, len(prompts)):
                llama_cpp.llama_memory_seq_cp(context.memory, 0, sequence, 0, num_shared)
        rows = [
            _Row(prompt[at], at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at in range(num_shared, len(prompt))
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(rows), _BATCH_TOKENS):
            self._extend(outputs, context, rows[start : start + _BATCH_TOKENS])
        for step in range(num_tokens - 1):
            rows = [
                _Row(output[-1], len(prompts[sequence]) + step, sequence, True)
                for sequence, output in enumerate(outputs)
            ]
            self._extend(outputs, context, rows)
        return outputs

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """One llama_decode that wants every row."""
        context = self._context(1, MAX_MODEL_LEN, 0)
        llama_cpp.llama_memory_clear(context.memory, False)
        context.decode([_Row(token, position, 0, True) for position, token in enumerate(token_ids)])
        pointer = llama_cpp.llama_get_logits(context.pointer)
        return np.ctypeslib.as_array(pointer, (len(token_ids), self._vocab_size)).copy()

    def _context(self, num_sequences: int, longest: int, num_shared: int) -> _Context:
        """The context for such prompts: the last one if it is of that shape.

        No more KV memory than the prompts need, since llama.cpp writes to all of it at once: streams of its own are
        multiples of 256 tokens, a unified memory has one copy of the shared prefix and is rounded as a whole. Nor two
        contexts at a time: a server has one.
        """
        unified = num_shared > 0
        if num_sequences == 1:
            num_tokens = MAX_MODEL_LEN
        elif unified:
            num_tokens = num_shared + num_sequences * (longest - num_shared)
        else:
            num_tokens = num_sequences * (-(-longest // 256) * 256)
        shape = (num_sequences, num_tokens, unified)
        if self._current is None or shape != self._shape:
            if self._current is not None:
                self._current.close()
            self._current = _Context(self._model, self._threads, num_sequences, num_tokens, unified)
            self._shape = shape
        return self._current

    def _extend(self, outputs: list[list[int]], context: _Context, rows: Sequence[_Row]) -> None:
        """Computes `rows` and appends the likeliest token to the output of each sequence that wants one."""
        context.decode(rows)
        for index, row in enumerate(rows):
            if row.wanted:
                token = llama_cpp.llama_sampler_sample(self._sampler, context.pointer, index)
                outputs[row.sequence].append(token)
