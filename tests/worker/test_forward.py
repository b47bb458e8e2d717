"""Which passes a runner may record and repeat."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dovetail.contracts.device import Runtime
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv import KVSpec, LayerCache, StateSpec
from dovetail.contracts.model import CausalLM
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.worker.forward import RepeatingForward, create_forward
from dovetail.worker.plain_device import PlainDevice

PAGES, STATE = KVSpec(num_kv_heads=2, head_size=8, dtype="float32"), StateSpec(num_elements=64, dtype="float32")


class Model:
    """Passes are not run here."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(("caches", "repeats"), [((PAGES, None, PAGES), True), ((PAGES, STATE), False)])
def test_passes_that_change_a_state_are_not_repeated(caches: tuple[LayerCache | None, ...], repeats: bool) -> None:
    """Proving a recording runs a pass twice, and a state would have advanced twice."""
    forward = create_forward(
        PlainDevice("cpu"), None, cast(CausalLM, Model()), {}, cast(Any, SchedulerLimits), [1], caches=caches
    )
    assert isinstance(forward, RepeatingForward) == repeats


def test_an_executor_that_names_graphs_which_no_step_has_is_refused() -> None:
    """Any executor may bring a `Runtime`, and not all look at the need's max_num_seqs."""
    runtime, limits = Runtime(PlainDevice, graphs=(2, 8)), SchedulerLimits(64, 4, 64)
    with pytest.raises(ConfigError, match="max_num_seqs is 4"):
        create_forward(PlainDevice("cpu"), runtime, cast(CausalLM, Model()), {}, limits, [1])
