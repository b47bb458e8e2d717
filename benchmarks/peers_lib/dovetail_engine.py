"""Dovetail. Options: `overrides`, a list of `key=value` as `-o` takes them, and `max_model_len`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import dovetail
from dovetail import LLM, SamplingParams

from .base import MAX_MODEL_LEN, EngineSpec, Prompts, ScoringEngine


class DovetailEngine(ScoringEngine):
    """`LLM`, with its defaults where the overrides say nothing."""

    def __init__(self, spec: EngineSpec):
        self.version = dovetail.__version__
        self._llm = LLM(
            model={"path": spec.model, "max_model_len": spec.options.get("max_model_len", MAX_MODEL_LEN)},
            executor={"threads": spec.threads},
            options=spec.options["overrides"],
        )

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """Shared prefixes are found by the prefix cache."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Records the hidden states of an ordinary request's steps: what is judged is what serves.

        Reaches into the worker, because the public log probabilities are the top few only.
        """
        worker: Any = self._llm.engine.tokens._parts.executor._worker  # type: ignore[attr-defined]
        model, forward = worker._loaded.model, worker._running.forward
        recorded: list[torch.Tensor] = []
        run = forward.run

        def recording(*arguments: Any) -> Any:
            hidden, layer_states = run(*arguments)
            recorded.append(hidden.clone())
            return hidden, layer_states

        self._llm.reset_prefix_cache()
        forward.run = recording
        try:
            self.generate([token_ids], 1)
        finally:
            forward.run = run
        hidden = torch.cat(recorded) if recorded else torch.empty(0)
        if len(hidden) != len(token_ids):
            raise RuntimeError(f"recorded {len(hidden)} hidden states for {len(token_ids)} tokens")
        with torch.inference_mode():
            logits: np.ndarray = model.compute_logits(hidden).float().numpy()
        return logits
