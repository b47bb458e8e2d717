"""What a draft model costs the first token: TTFT with it, as a multiple of TTFT without a drafter.

    python benchmarks/draft_prefill.py [--model ...] [--draft ...] [--repeats 30]

Requests of both lengths and without a drafter take turns with the same prompts, one at a time, no prefix is cached. By
default the target is its own draft model, the worst case: its prefill costs as much as the target's.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from typing import Any

from dovetail import LLM, SamplingParams
from dovetail.plugins.model_sources.package import DEFAULT_MODEL

ARMS = ("off", "adaptive", "fixed")
LENGTHS = (32, 128, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the model that comes with Dovetail")
    parser.add_argument("--draft", help="default: the target itself")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=8)
    options = parser.parse_args()
    model: dict[str, Any] = {} if options.model is None else {"path": options.model}
    path = options.draft or options.model or DEFAULT_MODEL
    drafters = {
        length: {"name": "draft_model", "path": str(path), "num_tokens": 4, "length": length} for length in ARMS[1:]
    }
    draw = random.Random(0)
    with LLM(model=model, cache={"prefix_caching": False}, speculative={"drafters": drafters, "default": None}) as llm:
        print("| prompt | TTFT without | " + " | ".join(f"{arm}, median of paired ratios" for arm in ARMS[1:]) + " |")
        print("| --- | --- | --- | --- |")
        for length in LENGTHS:
            times: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for _ in range(options.repeats):
                prompt = [draw.randrange(100, 5000) for _ in range(length)]
                for arm in draw.sample(ARMS, len(ARMS)):
                    params = SamplingParams(
                        temperature=0, max_tokens=options.max_tokens, ignore_eos=True, speculation=arm
                    )
                    [output] = llm.generate([prompt], params, use_tqdm=False)
                    metrics = output.metrics
                    assert metrics.first_token_time is not None
                    times[arm].append(1e3 * (metrics.first_token_time - metrics.arrival_time))
            ratios = [median(b / a for a, b in zip(times["off"], times[arm], strict=True)) for arm in ARMS[1:]]
            cells = " | ".join(f"{ratio:.2f}x, plain / it {1 / ratio:.2f}" for ratio in ratios)
            print(f"| {length} tokens | {median(times['off']):.1f} ms | {cells} |", flush=True)


if __name__ == "__main__":
    main()
