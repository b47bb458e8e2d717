"""Contexts for blocks that are tested by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.nn import BuildContext, ModelContext
from dovetail.nn.planning import PlannedRank


class OneOfMany(PlannedRank):
    """A given rank of a group that cannot communicate: enough to load a share of the weights."""

    def __init__(self, rank: int, size: int):
        super().__init__(size)
        self.rank = rank


MakeContext = Callable[..., ModelContext]


@pytest.fixture
def make_context() -> MakeContext:
    """make_context(rank=1, size=2, dtype=..., max_model_len=..., quantization=...)."""

    def make(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32, **kwargs: Any) -> ModelContext:
        values = {"max_model_len": 64, "kv_dtype": "float32", "device": torch.device("cpu")} | kwargs
        if size > 1:
            values["communicator"] = OneOfMany(rank, size)
        return BuildContext(dtype=dtype, **values)

    return make
