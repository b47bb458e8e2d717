"""What generate.py wrote, and what both trainings share: the split, the vocabulary of the loss, and the loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

HELD_OUT = 0.06


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


def teacher_probs(hidden: Tensor, next_ids: Tensor, vocabulary: LossVocabulary) -> Tensor:
    """What a drafter should say where the target's state is `hidden` and `next_ids` followed: half the target's
    distribution, half the token itself. float32 [n, v]; rows of tokens that are left out sum to less than 1."""
    with torch.no_grad():
        probs = torch.softmax(hidden @ vocabulary.unembed.T, -1)
        place = vocabulary.place[next_ids]
        inside = (place >= 0).nonzero()[:, 0]
        probs[inside, place[inside]] += 1
        return probs / 2


def cross_entropy(states: Tensor, probs: Tensor, vocabulary: LossVocabulary) -> Tensor:
    """Mean over rows of the cross entropy between `probs` and what `states` say."""
    logits = states @ vocabulary.unembed.T
    return (probs.sum(-1) * logits.logsumexp(-1) - (probs * logits).sum(-1)).mean()
