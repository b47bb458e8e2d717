"""Serving: requests per second through the whole engine, the host's gaps, and transformers' `generate` as the peer, on
the same machine with the same sizes: prompts of one length as one batch, which is the best case of a static batch."""

from __future__ import annotations

import gc
import time
from statistics import median

import torch
from common import Arguments, Report, engine_sections, model_config, random_model, run

from dovetail import LLMEngine, SamplingParams


def body(report: Report, arguments: Arguments) -> None:
    """Ours, then theirs, in one process."""
    number, prompt_len, output_len = (6, 24, 8) if arguments.null else (256, 512, 128)
    prompts = [[(31 * i + 17 * j) % 500 + 2 for j in range(prompt_len)] for i in range(number)]
    report.add("requests", f"{number}: {prompt_len} in, {output_len} out")
    ours = serve(report, arguments, prompts, output_len)
    gc.collect()
    if not arguments.null:
        torch.cuda.empty_cache()
    try:
        theirs = peer(report, arguments, prompts, output_len)
    except Exception as error:  # the peer's fault costs the comparison, not the rest
        report.add(f"transformers: {type(error).__name__}: {error}"[:120], "not run")
        return
    ratio = ours / theirs
    report.add("times transformers' requests/s", ratio, goal="at least 5", good=ratio >= 5)


def serve(report: Report, arguments: Arguments, prompts: list[list[int]], output_len: int) -> float:
    """Requests per second of the engine."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    with random_model(arguments) as directory:
        sections = engine_sections(arguments, directory)
        with LLMEngine.from_config(sections) as engine:
            run_all(engine, prompts[:4], params, "warm")
            clock = engine.tokens._parts.executor.clock  # type: ignore[attr-defined]
            clock.synchronize()
            clock.marks.clear()
            started = time.perf_counter()
            num_steps = run_all(engine, prompts, params, "r")
            seconds = time.perf_counter() - started
            gaps = clock.gaps()
    report.add("dovetail", len(prompts) / seconds, "requests/s")
    report.add("dovetail: output", len(prompts) * output_len / seconds, "tokens/s")
    report.add("dovetail: steps", num_steps)
    gap = 1e3 * median(gaps)
    report.add("dovetail: device idle between steps, median", gap, "ms", goal="under 0.3 ms", good=gap < 0.3)
    report.add("dovetail: device idle in all", sum(max(0.0, gap) for gap in gaps) / seconds, "of the time")
    return len(prompts) / seconds


def run_all(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, prefix: str) -> int:
    """Runs all prompts to their end; how many steps that took."""
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{prefix}{index}", {"prompt_token_ids": prompt}, params)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return steps


def peer(report: Report, arguments: Arguments, prompts: list[list[int]], output_len: int) -> float:
    """Requests per second of transformers' `generate`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in model_config(arguments).items() if key not in ("model_type", "torch_dtype")}
    config = AutoConfig.for_model("llama", **values)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=arguments.dtype, attn_implementation="sdpa").eval()
        inputs = torch.tensor(prompts)
        mask = torch.ones_like(inputs)

    def generate(count: int, length: int) -> torch.Tensor:
        found = model.generate(
            inputs[:count], attention_mask=mask[:count], max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        return found[:, inputs.shape[1] :].cpu()

    generate(4, 4)
    started = time.perf_counter()
    outputs = generate(len(prompts), output_len)
    seconds = time.perf_counter() - started
    report.add("transformers: tokens per request", outputs.shape[1], good=outputs.shape == (len(prompts), output_len))
    report.add("transformers", len(prompts) / seconds, "requests/s")
    return len(prompts) / seconds


if __name__ == "__main__":
    run("serving", body)
