"""CTranslate2's `Generator`. Options: `compute_type`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import numpy as np

from .base import EngineSpec, Prompts, ScoringEngine


class CTranslate2Engine(ScoringEngine):
    """One batch per call."""

    def __init__(self, spec: EngineSpec):
        self.version = ctranslate2.__version__
        self._generator = ctranslate2.Generator(
            spec.model,
            device="cpu",
            compute_type=spec.options["compute_type"],
            intra_threads=spec.threads,
            inter_threads=1,
        )
        self._pieces: list[str] = json.loads((Path(spec.model) / "vocabulary.json").read_text())

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """A shared prefix is its static prompt."""
        pieces = [[self._pieces[token] for token in prompt[num_shared:]] for prompt in prompts]
        prefix = [self._pieces[token] for token in prompts[0][:num_shared]]
        results = self._generator.generate_batch(
            pieces,
            static_prompt=prefix or None,
            max_length=num_tokens,
            min_length=num_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            # A code token that greedy prose never meets: there is no option to ignore the end of sequence.
            end_token=["<repo_name>"],
        )
        return [list(result.sequences_ids[0]) for result in results]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """One `forward_batch`."""
        pieces = [self._pieces[token] for token in token_ids]
        result: np.ndarray = np.array(self._generator.forward_batch([pieces]), dtype=np.float32)[0]
        return result
