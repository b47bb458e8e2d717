"""Hugging Face transformers' `generate`. Options: `dtype`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from .base import EngineSpec, Prompts, ScoringEngine


class TransformersEngine(ScoringEngine):
    """One batch per call; it shares no prefixes."""

    def __init__(self, spec: EngineSpec):
        self.version = transformers.__version__
        torch.set_num_threads(spec.threads)
        dtype = getattr(torch, spec.options["dtype"])
        self._network = AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype).eval()
        self._network.generation_config.eos_token_id = None
        self._network.generation_config.pad_token_id = 0

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """Prompts of one length, so that nothing is padded."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self._network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """One forward pass."""
        with torch.inference_mode():
            logits: np.ndarray = self._network(torch.tensor([list(token_ids)])).logits[0].float().numpy()
        return logits
