"""Greedy tokens on the GPU against the CPU, both in float32, on a real model if one is given, in several ways of
running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import Arguments, Report, engine_sections, random_model, run

from dovetail import LLM, SamplingParams

PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60)), [7] * 20, list(range(40, 300))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def body(report: Report, arguments: Arguments) -> None:
    """Both comparisons."""
    # The CPU multiplies float32 as it is; tensor cores would round it to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    with random_model(arguments) as directory:
        if arguments.model is None:
            if not arguments.null:
                report.add("a real model: not run, no --model was given", "skipped")
                return
            own: dict[str, Any] = engine_sections(arguments, directory)
        else:
            own = {"model": {"path": str(Path(arguments.model)), "dtype": "float32", "tokenizer_mode": "none"}}
        compare(report, arguments, own)


def compare(report: Report, arguments: Arguments, sections: dict[str, Any]) -> None:
    """The same prompts on the CPU, and here in each of several ways."""
    model = {"model": sections["model"]}
    cpu = model | {"device": "cpu", "executor": "cpu", "attention": "reference", "cache": {"num_blocks": 400}}
    expected = generate(cpu)
    base: dict[str, Any] = model | {"cache": {"memory_gib": 0.5 if arguments.null else 2.0}}
    executor: dict[str, Any] = {"name": "gpu"}
    if arguments.null:
        base |= {"device": "cpu", "attention": "reference"}
        executor |= {"device": "null"}
    ways: dict[str, dict[str, Any]] = {
        "eager": {"executor": executor | {"cuda_graphs": "off"}},
        "captured": {"executor": executor},
        "plain operators": {"executor": executor, "model": {**sections["model"], "operators": None}},
        "chunks of 64 tokens": {"executor": executor, "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8}},
        "speculation": {"executor": executor, "speculative": {"drafters": {"lookup": {"name": "ngram"}}}},
    }
    for name, way in ways.items():
        try:
            found = generate(base | way)
        except Exception as error:  # one way's fault, not the others'
            report.add(f"{name}: {type(error).__name__}: {error}"[:120], "raised", good=False)
            continue
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        shown = f"{same} of {len(expected)}"
        report.add(f"{name}: requests with the CPU's tokens", shown, good=same == len(expected))


def generate(sections: dict[str, Any]) -> list[list[int]]:
    """Tokens of every prompt."""
    with LLM(**sections) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


if __name__ == "__main__":
    run("tokens", body)
