"""The rule about checkpoints that score: a decoder with a score head in place of the output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.errors import ModelError, PluginError
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import architectures_of

_SCORES, _GENERATES = "ForSequenceClassification", "ForCausalLM"
_USUAL_LABELS = 2
"""What transformers takes where a config names no labels; it leaves them out when it writes one."""


def split_score_head(state: Resolution, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """The config of the decoder alone and the number of labels of its head; 0 where the checkpoint has none.

    Families build causal language models. Where none builds an architecture "...ForSequenceClassification" itself, and
    one builds the "...ForCausalLM" of that name, the decoder is built as this, tied, so that it needs no output layer;
    the worker reads the head. Raises `ModelError` for labels that cannot be counted.
    """
    (name, *_) = architectures_of(config) or [""]
    if not name.endswith(_SCORES):
        return config, 0
    decoder = name.removesuffix(_SCORES) + _GENERATES
    known = _known_architectures(state)
    if name in known or decoder not in known:
        return config, 0
    return {**config, "architectures": [decoder], "tie_word_embeddings": True}, _num_labels(config)


def _known_architectures(state: Resolution) -> set[str]:
    found: set[str] = set()
    for entry in state.registry.entries("model_family"):
        try:
            family: Any = state.registry.load_entry(entry)
        except PluginError:  # choosing the family says so
            continue
        found |= set(family.architectures)
    return found


def _num_labels(config: Mapping[str, Any]) -> int:
    labels, number = config.get("id2label"), config.get("num_labels")
    count = len(labels) if isinstance(labels, Mapping) else _USUAL_LABELS if number is None else number
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ModelError(f"num_labels is {count!r} in the model's config: it must be 1 or more")
    return count
