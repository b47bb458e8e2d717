"""Small random checkpoints of encoders, made on the spot by Hugging Face transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dovetail.testing.tiny_models import tiny_config


def tiny_encoder(model_type: str = "bert", seed: int = 0, num_labels: int = 0, **overrides: Any) -> Any:
    """The random float32 transformers encoder of a `tiny_config`, in eval mode; with `num_labels` one that classifies
    sequences. Its weights are wider than a fresh model's and its norms are not all ones, so that no two tokens have
    nearly the same states."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    labels = {"num_labels": num_labels} if num_labels else {}
    config = tiny_config(model_type, **{"pad_token_id": 0} | labels | overrides)
    create: Any = AutoModelForSequenceClassification if num_labels else AutoModel
    model: Any = create.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
    return model


def save_tiny_encoder(
    directory: Path, model_type: str = "bert", seed: int = 0, num_labels: int = 0, **overrides: Any
) -> Any:
    """Writes the checkpoint of `tiny_encoder` to `directory` and returns the model."""
    model = tiny_encoder(model_type, seed, num_labels, **overrides)
    model.save_pretrained(directory)
    return model


def save_word_pieces(directory: Path) -> None:
    """Writes a tokenizer of word pieces as BERT's, which puts [CLS] and [SEP] around a text and types the tokens of
    a pair 0 and 1."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["the", "cat", "dog", "sat", "on", "mat", "what", "is", "a", "##s", "##ing", ".", "?"]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ends)
    # As many checkpoints have it: what training needed must not cut texts here.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


__all__ = ["save_tiny_encoder", "save_word_pieces", "tiny_encoder"]
