"""Greedy tokens on the GPU against the CPU, both in float32, on a model of random weights, and on a real one if one is
given, in several ways of running it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import HERE, LLAMA_8B, Arguments, Report, run

from dovetail import LLM, SamplingParams

PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60)), [7] * 20, list(range(40, 300))]
AS_NUMBERS = {"dtype": "float32", "tokenizer_mode": "none"}
RANDOM = LLAMA_8B | {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
"""A small model with heads of a large one."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=48, ignore_eos=True)


def body(report: Report, arguments: Arguments) -> None:
    """A model of random weights, then the real one."""
    # The CPU multiplies float32 as it is; tensor cores would round it to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(RANDOM))
        model = {"path": directory, "weight_format": f"{HERE / 'random_weights.py'}:RandomWeights"}
        compare(report, arguments, {"model": {**model, **AS_NUMBERS}}, "random weights")
    if arguments.model is None:
        report.add("a real model: not run, no --model was given", "skipped")
    else:
        compare(report, arguments, {"model": {"path": str(Path(arguments.model)), **AS_NUMBERS}}, "real model")


def compare(report: Report, arguments: Arguments, sections: dict[str, Any], what: str) -> None:
    """The same prompts on the CPU, and here in each of several ways."""
    model = {"model": sections["model"]}
    cpu = model | {"device": "cpu", "executor": "cpu", "attention": "reference", "cache": {"num_blocks": 400}}
    expected = generate(cpu, GREEDY)
    sampled = generate(cpu, SAMPLED)
    base: dict[str, Any] = model | {"cache": {"memory_gib": 0.5 if arguments.null else 2.0}}
    # Named sizes, which are refused where they cannot be captured.
    executor: dict[str, Any] = {"name": "gpu", "cuda_graphs": [2, 8]}
    if arguments.null:
        base |= {"device": "cpu", "attention": "reference"}
        executor |= {"device": "null", "cuda_graphs": "off"}  # no bundled backend can be captured on a CPU
    ways: dict[str, dict[str, Any]] = {
        "eager": {"executor": executor | {"cuda_graphs": "off"}},
        "captured": {"executor": executor},
        "plain operators": {"executor": executor, "model": {**sections["model"], "operators": None}},
        "chunks of 64 tokens": {"executor": executor, "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8}},
        "speculation": {"executor": executor, "speculative": {"drafters": {"lookup": {"name": "ngram"}}}},
        "little memory, swapped": {"executor": executor, "cache": {"num_blocks": 26, "swap_gib": 0.1}},
    }
    if arguments.null:
        del ways["captured"]
    for name, way in ways.items():
        judge(report, f"{what}, {name}", lambda way=way: generate(base | way, GREEDY), expected)  # type: ignore[misc]
    judge(report, f"{what}, asleep and woken", lambda: generate_woken(base | {"executor": executor}), expected)
    # A draw near the edge of two tokens may round to the other one.
    judge(
        report,
        f"{what}, sampled with seeds",
        lambda: generate(base | {"executor": executor}, SAMPLED),
        sampled,
        least=0.6,
    )


def judge(
    report: Report, name: str, work: Callable[[], list[list[int]]], expected: list[list[int]], least: float = 1.0
) -> None:
    """How many requests have the CPU's tokens, and whether that is the share that it should be."""
    try:
        found = work()
    except Exception as error:  # one way's fault, not the others'
        report.add(f"{name}: {type(error).__name__}: {error}"[:120], "raised", good=False)
        return
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    good = same >= least * len(expected)
    report.add(f"{name}: requests with the CPU's tokens", f"{same} of {len(expected)}", good=good)


def generate(sections: dict[str, Any], params: SamplingParams) -> list[list[int]]:
    """Tokens of every prompt."""
    with LLM(**sections) as llm:
        return tokens(llm, params)


def generate_woken(sections: dict[str, Any]) -> list[list[int]]:
    """Tokens of an engine that slept at both levels after it had been at work."""
    with LLM(**sections) as llm:
        for level in (1, 2):
            tokens(llm, GREEDY)
            llm.engine.sleep(level)
            llm.engine.wake_up()
        return tokens(llm, GREEDY)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """Of every prompt."""
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


if __name__ == "__main__":
    run("tokens", body)
