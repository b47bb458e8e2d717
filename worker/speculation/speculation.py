"""What the model runner says of each step to whoever speculates on its rank, and the answer where nobody does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from dovetail.contracts.step import StepPlan
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.sampling.sampler import Sampler


class Speculation(ABC):
    """Drafts of one step are verified in the next. In every step the runner calls `begin`, `verify` and `propose`."""

    lets_steps_overlap: ClassVar[bool]
    """Whether a step may be handed over while the one before it runs: not where the host looks at each result."""
    max_drafts: int
    """Most drafts of a request in one step."""
    hidden_layers: tuple[int, ...]
    """States between the target's layers that are wanted."""

    @abstractmethod
    def begin(self, plan: StepPlan) -> None:
        """Requests come and go, before the batch takes in the plan."""

    @abstractmethod
    def verify(self, step: ComputedStep, sampler: Sampler) -> None:
        """Judges the drafts that the step computed; accepted ones and the token after them go to `step.tokens`."""

    @abstractmethod
    def propose(self, step: ComputedStep, sampler: Sampler, seconds: float) -> None:
        """Drafts for the next step wait in the batch; how many, and what went wrong, goes to `step.tokens`.

        Args:
            seconds: what the step took so far.
        """

    @abstractmethod
    def finish_all(self) -> None:
        """Every request that is known here has ended."""

    @abstractmethod
    def forget_finished(self) -> None:
        """As `finish_all`, and what requests taught is dropped too."""


class NoSpeculation(Speculation):
    """Nobody speculates: nothing to do."""

    lets_steps_overlap = True
    max_drafts = 0
    hidden_layers = ()

    def begin(self, plan: StepPlan) -> None:
        """Nothing."""

    def verify(self, step: ComputedStep, sampler: Sampler) -> None:
        """Nothing."""

    def propose(self, step: ComputedStep, sampler: Sampler, seconds: float) -> None:
        """Nothing."""

    def finish_all(self) -> None:
        """Nothing."""

    def forget_finished(self) -> None:
        """Nothing."""
