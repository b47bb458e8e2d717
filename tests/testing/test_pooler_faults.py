"""What the suite of poolers finds: each a change in a pooler that passes."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.pooling import Pooler, PoolerCapabilities, PoolerSetup, PoolingState
from dovetail.contracts.pooling_params import CLASSIFY, EMBED
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.pooler_suite import PoolerSuite


class Mean(Pooler):
    """The mean of all states."""

    contract = (1, 0)
    capabilities = PoolerCapabilities(tasks=frozenset({EMBED}), modes=frozenset({"mean"}))
    State: ClassVar[type[MeanState]]

    def start(self, num_tokens: int) -> PoolingState:
        return self.State(num_tokens)


class MeanState(PoolingState):
    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.total: Any = 0.0
        self.count = 0

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self.total = self.total + hidden.double().sum(0)
        self.count += len(positions)

    def finish(self) -> torch.Tensor:
        result: torch.Tensor = (self.total / self.count).float()
        return result


Mean.State = MeanState


class TestMean(PoolerSuite):
    plugin = Mean


def with_state(state: type[PoolingState]) -> type[Pooler]:
    """The mean with another state."""
    return type(state.__name__, (Mean,), {"State": state})


class MeanOfMeans(MeanState):
    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self.total = self.total + hidden.mean(0)
        self.count += 1


class LastChunk(MeanState):
    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self.total, self.count = hidden.double().sum(0), len(positions)


class KeepsViews(MeanState):
    def __init__(self, num_tokens: int):
        super().__init__(num_tokens)
        self.chunks: list[torch.Tensor] = []

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self.chunks.append(hidden)

    def finish(self) -> torch.Tensor:
        return torch.cat(self.chunks).mean(0)


class WritesIntoStates(MeanState):
    def add(self, hidden: torch.Tensor, positions: range) -> None:
        super().add(hidden.mul_(0.5), positions)


class SumsInTheModelsDtype(MeanState):
    def add(self, hidden: torch.Tensor, positions: range) -> None:
        for row in hidden:
            self.total = self.total + row
        self.count += len(positions)


class AddsNoise(MeanState):
    """Another number each time."""

    noise = itertools.count(1)

    def finish(self) -> torch.Tensor:
        return super().finish() + 1e-3 * next(self.noise)


class KeepsADimension(MeanState):
    def finish(self) -> torch.Tensor:
        return super().finish()[None]


class SaysTheSame(MeanState):
    def finish(self) -> torch.Tensor:
        return torch.ones_like(super().finish())


class DividesByOneLess(MeanState):
    def finish(self) -> torch.Tensor:
        return super().finish() * self.count / torch.tensor(float(self.count - 1))


class OneStateForAll(Mean):
    """Requests of one engine share their sum."""

    def __init__(self, options: PluginOptions, setup: PoolerSetup):
        super().__init__(options, setup)
        self.state = MeanState(0)

    def start(self, num_tokens: int) -> PoolingState:
        return self.state


class RemembersByLength(Mean):
    """Goes on with the state of an earlier prompt of the same length that did not finish."""

    def __init__(self, options: PluginOptions, setup: PoolerSetup):
        super().__init__(options, setup)
        self.states: dict[int, MeanState] = {}

    def start(self, num_tokens: int) -> PoolingState:
        return self.states.setdefault(num_tokens, MeanState(num_tokens))


class SharedByEngines(Mean):
    total: ClassVar[list[torch.Tensor]] = []

    def start(self, num_tokens: int) -> PoolingState:
        self.total.clear()
        return _Shared(self.total)


class _Shared(PoolingState):
    def __init__(self, chunks: list[torch.Tensor]):
        self.chunks = chunks

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self.chunks.append(hidden.clone())

    def finish(self) -> torch.Tensor:
        return torch.cat(self.chunks).mean(0)


class KeepsAll(Mean):
    def __init__(self, options: PluginOptions, setup: PoolerSetup):
        super().__init__(options, setup)
        self.log: list[PoolingState] = []

    def start(self, num_tokens: int) -> PoolingState:
        self.log.append(super().start(num_tokens))
        return self.log[-1]


class ClaimsThatTheEndSuffices(Mean):
    capabilities = PoolerCapabilities(tasks=frozenset({EMBED}), skips_prefix=True)


class HasNoTask(Mean):
    capabilities = PoolerCapabilities()


class Scores(Mean):
    """Scores the mean, and takes any checkpoint."""

    capabilities = PoolerCapabilities(tasks=frozenset({CLASSIFY}))


FAULTS = [
    Fault("averages the means of chunks", with_state(MeanOfMeans), "test_chunks_do_not_matter"),
    Fault("forgets all but the last chunk", with_state(LastChunk), "test_chunks_do_not_matter"),
    Fault("keeps views of the host's memory", with_state(KeepsViews), "test_memory_of_the_states_is_the_host_s"),
    Fault("writes into the states", with_state(WritesIntoStates), "test_states_are_not_written_to"),
    Fault("sums in the model's dtype", with_state(SumsInTheModelsDtype), "test_sums_are_taken_in_float32_or_better"),
    Fault("adds noise", with_state(AddsNoise), "test_the_same_states_give_the_same_result"),
    Fault("keeps a dimension", with_state(KeepsADimension), "test_results_have_the_shape_of_the_task"),
    Fault("says the same of everything", with_state(SaysTheSame), "test_results_follow_from_the_states"),
    Fault("divides by one less than the tokens", with_state(DividesByOneLess), "test_a_prompt_may_have_one_token"),
    Fault("has one state for all requests", OneStateForAll, "test_requests_are_apart"),
    Fault("remembers requests by their length", RemembersByLength, "test_a_preempted_request_starts_again"),
    Fault("has one state for all engines", SharedByEngines, "test_engines_are_apart"),
    Fault("keeps all that ended", KeepsAll, "test_forgets_what_has_ended"),
    Fault("claims that the end suffices", ClaimsThatTheEndSuffices, "test_the_beginning_of_a_prompt_may_be_cached"),
    Fault("declares no task", HasNoTask, "test_declares_its_tasks"),
    Fault("scores without labels", Scores, "test_needs_labels_for_scores"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_pooler_that(fault: Fault) -> None:
    check_fault(fault, PoolerSuite, plugin=fault.plugin)
