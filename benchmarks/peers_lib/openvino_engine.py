"""OpenVINO GenAI's continuous batching. No options: the exported model's precision decides."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai

from .base import Engine, EngineSpec, Prompts


class OpenVINOEngine(Engine):
    """`ContinuousBatchingPipeline` with its prefix cache."""

    def __init__(self, spec: EngineSpec):
        self.version = openvino_genai.__version__
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": spec.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(spec.model, scheduler, "CPU", properties)

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """Its prefix cache serves what finished requests computed: with a shared prefix one request goes first."""
        if num_shared:
            return self._generate(prompts[:1], num_tokens) + self._generate(prompts[1:], num_tokens)
        return self._generate(prompts, num_tokens)

    def _generate(self, prompts: Prompts, num_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]
