"""What a plugin may not touch: what it is handed, which others look at too, and the process's random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch


@contextmanager
def leaves_alone(*handed: Any) -> Iterator[None]:
    """Asserts that what runs inside changes nothing of `handed`, and neither draws from the global generators of
    Python, numpy and torch nor seeds them."""
    # A seed that was set a moment ago could be set once more unnoticed.
    random.random(), np.random.random(), torch.rand(())
    before, generators = _content(handed), _generators()
    yield
    assert _content(handed) == before, "it changes what it is handed, which others look at too"
    for name, state in _generators().items():
        assert state == generators[name], f"it draws from the global generator of {name}, or seeds it"


def _generators() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy": _content(np.random.get_state()),
        "torch": _content(torch.get_rng_state()),
    }


def _content(value: Any) -> Any:
    """In a form that compares and keeps nothing of the original that can change."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [_content(vars(value)[item.name]) for item in fields(value)]
    if isinstance(value, list | tuple):
        return type(value), [_content(item) for item in value]
    if isinstance(value, Mapping):
        return type(value), [(key, _content(item)) for key, item in value.items()]
    return value
