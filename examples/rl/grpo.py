"""What both examples share: a task with a verifiable reward, and GRPO (Shao et al., DeepSeekMath, 2024, section 4.1)
without its KL term.

A model of short stories is asked to go on with an opening. The reward is the share of sentences that a small reader can
follow: those of at most MAX_WORDS words. A rule decides it, no model.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from dovetail import RequestOutput, SamplingParams
from dovetail.rl.training_forward import TrainingForward

OPENINGS = (
    "Once upon a time, there was a little",
    "One day, a girl named Lily went to the",
    "Tom and his dog liked to",
    "There was a big tree in the",
    "Every morning, the old man",
    "In the garden, a small bird",
    "Mia had a red ball. She",
    "It was raining, and the cat",
)
GROUP_SIZE = 8
"""Answers to one opening, which are compared with each other."""
NUM_TOKENS = 48
OPENINGS_PER_STEP = 4
CLIP = 0.2
MAX_WORDS = 7


def reward_of(text: str) -> float:
    """The share of short sentences; the last one counts as far as it goes."""
    lengths = [len(sentence.split()) for sentence in re.split(r"[.!?]", text)]
    counted = [length <= MAX_WORDS for length in lengths if length]
    return sum(counted) / max(1, len(counted))


@dataclass(frozen=True)
class Rollout:
    """One answer of the engine."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    """Of the tokens, by the engine that drew them."""
    reward: float
    weight_version: int


@dataclass(frozen=True)
class Step:
    """One step of training; means over its rollouts."""

    reward: float
    difference: float
    """Mean |log probability by the trainer - by the engine| over all tokens, before the step."""
    max_difference: float
    weight_version: int
    rollout_s: float
    training_s: float
    update_s: float
    """From the end of training to an engine that generates with the new weights."""


def openings_of(step: int) -> list[str]:
    """Those of one step, in turn."""
    return [OPENINGS[(step * OPENINGS_PER_STEP + place) % len(OPENINGS)] for place in range(OPENINGS_PER_STEP)]


def sampling(seed: int, step: int) -> SamplingParams:
    """At temperature 1, so that the distribution that is drawn from is the model's. With the log probabilities."""
    return SamplingParams(temperature=1, n=GROUP_SIZE, max_tokens=NUM_TOKENS, logprobs=0, seed=1_000_000 * seed + step)


def groups_of(outputs: Sequence[RequestOutput]) -> list[list[Rollout]]:
    """The rollouts of each opening."""
    return [
        [
            Rollout(
                output.prompt_token_ids,
                completion.token_ids,
                [
                    entries[token].logprob
                    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
                ],
                reward_of(completion.text),
                output.weight_version,
            )
            for completion in output.outputs
        ]
        for output in outputs
    ]


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """How much better each answer is than its group, in standard deviations; 0 where all are alike."""
    values = torch.tensor(rewards)
    return ((values - values.mean()) / (values.std(correction=0) + 1e-4)).tolist()


def engine_keywords(path: Path, strict: bool) -> dict[str, Any]:
    """Of the engine's config, but for the transport of weights."""
    reproducibility = "strict" if strict else "default"
    model = {"path": str(path), "dtype": "float32"}
    return {"model": model, "cache": {"memory_gib": 0.25}, "reproducibility": reproducibility}


class Trainer:
    """A model of transformers in float32, and its optimizer."""

    def __init__(self, path: Path, learning_rate: float, forward: TrainingForward | None):
        """`forward`: computes log probabilities with the engine's kernels. None: the model does, with torch's."""
        self._forward = forward
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Under the checkpoint's names."""
        return iter(self._model.state_dict().items())

    def step(self, groups: Sequence[Sequence[Rollout]]) -> tuple[float, float]:
        """One step of the optimizer. Returns the mean and the largest |difference| of log probabilities before it."""
        rollouts = [rollout for group in groups for rollout in group]
        advantages = torch.tensor([value for group in groups for value in advantages_of([one.reward for one in group])])
        theirs, is_token = _padded([rollout.log_probs for rollout in rollouts])
        ours = self._log_probs(rollouts)
        ratio = torch.exp(ours - theirs)
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
        loss = -((gain * is_token).sum(1) / is_token.sum(1)).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        differences = (ours.detach() - theirs).abs()[is_token]
        return differences.mean().item(), differences.max().item()

    def _log_probs(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """[rollouts, longest answer], float32: of each token of an answer; what is behind an answer means nothing."""
        if self._forward is not None:
            self._forward.load(self._model.named_parameters())
            found = self._forward.log_probs([(one.prompt, one.tokens) for one in rollouts])
            return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        ids, is_id = _padded([[*rollout.prompt, *rollout.tokens] for rollout in rollouts])
        logits = self._model(ids.long(), attention_mask=is_id.long(), use_cache=False).logits
        found = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None].long())[..., 0]
        parts = [
            row[len(one.prompt) - 1 : len(one.prompt) - 1 + len(one.tokens)]
            for row, one in zip(found, rollouts, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _padded(rows: Sequence[Sequence[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one length, and where they are not filled up."""
    values = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return values, torch.arange(values.shape[1]) < torch.tensor([[len(row)] for row in rows])


class Clock:
    """Seconds since it was asked last."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Starts anew."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def step_of(groups: Sequence[Sequence[Rollout]], differences: tuple[float, float], seconds: Sequence[float]) -> Step:
    """The record of one step. `seconds`: of rollouts, of training, and of the update."""
    rewards = [rollout.reward for group in groups for rollout in group]
    return Step(sum(rewards) / len(rewards), *differences, groups[0][0].weight_version, *seconds)


class Train(Protocol):
    """One run of an example."""

    def __call__(
        self, path: Path, seed: int, num_steps: int, learning_rate: float, *, strict: bool
    ) -> Iterator[Step]: ...


def main(train: Train, description: str) -> None:
    """Trains once for each seed, prints each step, and writes one JSON file of all steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder in Hugging Face's format: stories15M, or a model like it")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, each with another seed")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--strict", action="store_true", help="engine and trainer compute with the same kernels")
    parser.add_argument("--output", type=Path, help="a JSON file, for plot.py")
    given = parser.parse_args()
    runs = []
    for seed in range(given.seeds):
        steps = []
        torch.manual_seed(seed)
        run = train(given.model, seed, given.steps, given.learning_rate, strict=given.strict)
        for number, step in enumerate(run):
            steps.append(asdict(step))
            print(
                f"seed {seed}, step {number}: reward {step.reward:.2f}, weights {step.weight_version}, |difference|"
                f" mean {step.difference:.1e}, max {step.max_difference:.1e}; rollouts {step.rollout_s:.2f} s,"
                f" training {step.training_s:.2f} s, update {step.update_s:.2f} s",
                flush=True,
            )
        runs.append(steps)
    if given.output is not None:
        given.output.write_text(json.dumps(runs))
