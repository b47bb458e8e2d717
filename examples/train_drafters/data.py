"""What generate.py wrote, and what both trainings share: the split, the vocabulary of the loss, and the loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HELD_OUT = 0.06
TOP = 8


@dataclass(frozen=True)
class Conversation:
    """One prompt with its answer. Row i of `hidden` predicted token i + 1."""

    token_ids: Tensor
    """int64 [n]"""
    hidden: Tensor
    """float16 [n - 1, hidden_size]"""
    num_prompt_tokens: int


@dataclass(frozen=True)
class Target:
    """The target's embedding and unembedding, float32 [vocab_size, hidden_size]."""

    embed: Tensor
    unembed: Tensor


def load_target(folder: Path) -> Target:
    """The matrices that recorder.py wrote."""
    tensors = load_file(folder / "target.safetensors")
    return Target(tensors["embed"], tensors["unembed"])


def load_conversations(folder: Path) -> tuple[list[Conversation], list[Conversation]]:
    """Those to train on, and those held out."""
    found = []
    for path in sorted(folder.glob("request-*.safetensors")):
        tensors = load_file(path)
        count = int(tensors["num_prompt_tokens"])
        found.append(Conversation(tensors["token_ids"].long(), tensors["hidden"], count))
    random.Random(0).shuffle(found)
    count = round(len(found) * HELD_OUT)
    return found[count:], found[:count]


@dataclass(frozen=True)
class LossVocabulary:
    """The tokens over which the loss is computed: those that answers use most.

    The softmax over the whole vocabulary is nearly all the work of a training step. Tokens that answers hardly
    ever hold are left out of it; heads share the target's unembedding, so that nothing pulls these up either.
    """

    token_ids: Tensor
    """int64 [v]"""
    place: Tensor
    """int64 [vocab_size]: the column of a token, -1 for those that are left out."""
    unembed: Tensor
    """float32 [v, hidden_size]"""
    coverage: float
    """Share of the answers' tokens that are in."""


def loss_vocabulary(conversations: Sequence[Conversation], target: Target, size: int) -> LossVocabulary:
    """The `size` most frequent tokens of the answers."""
    answers = torch.cat([c.token_ids[c.num_prompt_tokens :] for c in conversations])
    counts = torch.bincount(answers, minlength=len(target.embed))
    token_ids = counts.topk(min(size, int((counts > 0).sum()))).indices.sort().values
    place = torch.full((len(counts),), -1)
    place[token_ids] = torch.arange(len(token_ids))
    coverage = float(counts[token_ids].sum() / counts.sum())
    return LossVocabulary(token_ids, place, target.unembed[token_ids].contiguous(), coverage)


def save_vocabulary(vocabulary: LossVocabulary, folder: Path) -> None:
    """The tokens that the heads have learned to guess, as the drafters read them."""
    save_file({"token_ids": vocabulary.token_ids.int()}, folder / "draft_vocabulary.safetensors")


@dataclass(frozen=True)
class Lessons:
    """What a drafter should say at n places: half the target's distribution, half the token that came."""

    columns: Tensor
    """int64 [n, TOP + 1]: columns of the loss vocabulary."""
    weights: Tensor
    """float32 [n, TOP + 1]: sum to 1, or to less where the token that came is left out of the vocabulary."""


def lessons(hidden: Tensor, next_ids: Tensor, vocabulary: LossVocabulary) -> Lessons:
    """Of places where the target's state was `hidden` and `next_ids` followed. The target's distribution is cut to its
    `TOP` most likely tokens."""
    with torch.no_grad():
        best = torch.softmax(hidden.float() @ vocabulary.unembed.T, -1).topk(TOP)
        place = vocabulary.place[next_ids]
        columns = torch.cat([best.indices, place.clamp(min=0)[:, None]], -1)
        weights = torch.cat([best.values / best.values.sum(-1, keepdim=True), (place >= 0).float()[:, None]], -1)
        return Lessons(columns, weights / 2)


def cross_entropy(states: Tensor, wanted: Lessons, vocabulary: LossVocabulary) -> Tensor:
    """Mean over rows of the cross entropy between `wanted` and what `states` say."""
    logits = states @ vocabulary.unembed.T
    said = (wanted.weights * logits.gather(1, wanted.columns)).sum(-1)
    return (wanted.weights.sum(-1) * logits.logsumexp(-1) - said).mean()
