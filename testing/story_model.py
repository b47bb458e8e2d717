"""A small model that writes English, made in seconds: it has learned one story by heart, and tells it round and round.

For tests about text (stop strings, detokenization, lookups that find what was said before), without third-party files.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from dovetail.testing.tiny_models import tiny_config, tiny_model

STORY = (
    "Once upon a time, there was a little girl named Lily. She liked to play. One day, Lily saw a big cat. The cat saw "
    'the girl. "Hi," said Lily. "Can you play?" The cat was happy. Lily and the cat played all day in the sun. '
    "She was kind, and the cat was kind too. Then it was time to go home. The end. "
)
_STEPS = 120
_BATCH, _LENGTH = 8, 64


def save_story_model(directory: Path, num_layers: int = 2, vocab_size: int = 400) -> None:
    """Writes config.json, weights and tokenizer of a Llama in float32, with a vocabulary of every byte and the story's
    syllables, at most `vocab_size` in all, no chat template and no end token. Models of other numbers of layers have
    the same vocabulary. Takes some seconds the first time in a process."""
    from transformers import PreTrainedTokenizerFast

    model, tokenizer = _trained(num_layers, vocab_size)
    model.save_pretrained(directory)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    create: Any = PreTrainedTokenizerFast
    create(tokenizer_object=tokenizer, **special).save_pretrained(directory)


@cache
def _trained(num_layers: int, vocab_size: int) -> tuple[Any, Any]:
    """Model and tokenizer; nobody changes them."""
    tokenizer = _train_tokenizer(vocab_size)
    ids = torch.tensor(tokenizer.encode(STORY).ids)
    size = tokenizer.get_vocab_size()
    sizes = {"vocab_size": size, "num_hidden_layers": num_layers, "max_position_embeddings": 512}
    return _learn_by_heart(tiny_model(tiny_config("llama", tie_word_embeddings=True, **sizes)), ids), tokenizer


def _train_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([STORY], trainer)
    return tokenizer


def _learn_by_heart(model: Any, ids: torch.Tensor) -> Any:
    """Trains the model on pieces of the story that begin anywhere and go on behind its end."""
    generator = torch.Generator().manual_seed(0)
    rounds = ids.repeat(1 + -(-_LENGTH // len(ids)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(_STEPS):
        starts = torch.randint(0, len(ids), (_BATCH,), generator=generator).tolist()
        batch = torch.stack([rounds[start : start + _LENGTH] for start in starts])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval()


__all__ = ["STORY", "save_story_model"]
