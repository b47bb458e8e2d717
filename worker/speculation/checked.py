"""What drafters and acceptance rules answer, checked and rebuilt of plain lists before anything else looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.contracts.speculation import Draft, Verdict
from dovetail.nn.host_copies import on_device

_SUM_TOLERANCE = 1e-3
"""How far from 1 the sum of a draft's distribution may lie: float32 over a large vocabulary, and no more."""


def checked_draft(draft: object, vocab_size: int, device: torch.device, *, trees: bool) -> Draft:
    """A drafter's draft with lists of int and float in place of the sequences that came.

    Raises `ValueError` with a phrase that says what is wrong with it; sequences of a plugin's own may raise anything.

    Args:
        device: where the target's distributions lie.
        trees: whether the drafter may propose trees.
    """
    if not isinstance(draft, Draft):
        raise ValueError(f"it is a {type(draft).__name__}, not a Draft")
    token_ids = _integers(draft.token_ids, "token_ids")
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} lies outside the vocabulary of {vocab_size}")
    parents = None if draft.parents is None else _checked_parents(draft.parents, len(token_ids))
    probs = None if draft.probs is None else _checked_probs(draft.probs, token_ids, vocab_size, device)
    confidence = None if draft.confidence is None else _checked_confidence(draft.confidence, len(token_ids))
    checked = Draft(token_ids, parents, probs, confidence, bool(draft.from_prediction))
    if checked.is_tree and not trees:
        raise ValueError("it is a tree, and the drafter does not declare `trees`, or its options ask for none")
    return checked


def checked_verdict(verdict: object, draft: Draft, vocab_size: int) -> Verdict:
    """A rule's verdict about `draft`, rebuilt likewise. Raises `ValueError` with a phrase that says what is wrong with
    it."""
    if not isinstance(verdict, Verdict):
        raise ValueError(f"it is a {type(verdict).__name__}, not a Verdict")
    accepted, parents = _integers(verdict.accepted, "accepted"), draft.parent_indices
    last = -1
    for node in accepted:
        if not 0 <= node < len(parents):
            raise ValueError(f"node {node} of {len(parents)}")
        if parents[node] != last:
            raise ValueError(f"node {node} is accepted after node {last}, but its parent is {parents[node]}")
        last = node
    (token,) = _integers([verdict.next_token_id], "next_token_id")
    if not 0 <= token < vocab_size:
        raise ValueError(f"token id {token} lies outside the vocabulary of {vocab_size}")
    return Verdict(accepted, token)


def _items(values: object, name: str) -> list[Any]:
    if isinstance(values, np.ndarray | Tensor):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{name}: a {type(values).__name__} is no sequence of numbers")
    return list(values)


def _integers(values: object, name: str) -> list[int]:
    found = []
    for value in _items(values, name):
        try:
            number = index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise ValueError(f"{name}: a {type(value).__name__} is no int")
        found.append(number)
    return found


def _checked_parents(given: object, count: int) -> list[int]:
    parents = _integers(given, "parents")
    if len(parents) != count:
        raise ValueError(f"{len(parents)} parents for {count} nodes")
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"the parent of node {i} is {parent}; parents come before their children, -1 is the root")
    return parents


def _checked_confidence(given: object, count: int) -> list[float]:
    confidence = _items(given, "confidence")
    if len(confidence) != count:
        raise ValueError(f"{len(confidence)} confidences for {count} nodes")
    found = []
    for value in confidence:
        try:
            is_probability = bool(0 <= value <= 1)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"confidence: a {type(value).__name__} is no number") from None
        if not is_probability:
            raise ValueError("a confidence lies outside [0, 1]")
        found.append(float(value))
    return found


def _checked_probs(probs: object, token_ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    if not isinstance(probs, Tensor):
        raise ValueError(f"probs: a {type(probs).__name__} is no torch.Tensor")
    if tuple(probs.shape) != (len(token_ids), vocab_size):
        raise ValueError(f"probs have shape {tuple(probs.shape)}, expected {(len(token_ids), vocab_size)}")
    if probs.dtype != torch.float32 or probs.layout != torch.strided:
        raise ValueError(f"probs are {probs.dtype} and {probs.layout}, expected torch.float32 and torch.strided")
    if probs.device.type != device.type:
        raise ValueError(f"probs lie on {probs.device}, expected {device}")
    probs = probs.detach()
    if not len(probs):
        return probs
    chosen = probs.gather(1, on_device(np.array(token_ids, dtype=np.int64), probs.device)[:, None])
    # One look at the device for all three. Comparisons with NaN are false.
    looks = torch.stack((probs.min(), (probs.sum(-1) - 1).abs().max(), chosen.min()))
    least, off, rarest = looks.tolist()
    if not (least >= 0 and off < _SUM_TOLERANCE):
        raise ValueError("probs are no distributions: every row must be 0 or more, and sum up to 1")
    if not rarest > 0:
        raise ValueError("probs give a draft that its own distribution cannot give: the probability of its token is 0")
    return probs
