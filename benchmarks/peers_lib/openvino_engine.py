"""OpenVINO GenAI's continuous batching. No options: the exported model's precision decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from .base import EngineSpec, Prompts, ScoringEngine


class OpenVINOEngine(ScoringEngine):
    """`ContinuousBatchingPipeline` with its prefix cache."""

    def __init__(self, spec: EngineSpec):
        self.version = openvino_genai.__version__
        self._model = Path(spec.model) / "openvino_model.xml"
        self._scorer: openvino.InferRequest | None = None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        self._properties = {"INFERENCE_NUM_THREADS": spec.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(spec.model, scheduler, "CPU", self._properties)

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """Its prefix cache serves what finished requests computed: a shared prefix is asked for once, for one token,
        before the requests go together."""
        if num_shared:
            self._generate(prompts[:1], 1)
        return self._generate(prompts, num_tokens)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """The exported model in OpenVINO's own runtime with its defaults, since the pipeline tells no distributions."""
        if self._scorer is None:
            compiled = openvino.Core().compile_model(self._model, "CPU", self._properties)
            self._scorer = compiled.create_infer_request()
        self._scorer.reset_state()
        count = len(token_ids)
        values = {
            "input_ids": np.array([token_ids], dtype=np.int64),
            "attention_mask": np.ones((1, count), dtype=np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        wanted = {port.get_any_name() for port in self._scorer.model_inputs}
        result = self._scorer.infer({name: value for name, value in values.items() if name in wanted})
        logits: np.ndarray = np.array(result["logits"][0], dtype=np.float32)
        return logits

    def _generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]
