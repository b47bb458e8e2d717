"""Pooling: from the hidden states of a prompt to one vector, a vector per token, or scores.

A request with `PoolingParams` ends when its prompt is computed: nothing is sampled. It may share steps with requests
that generate. The kind `pooler` makes its result from the model's last hidden states, which come in chunks: the step
loop decides how many tokens of a prompt one step computes, and a pooler's result must not depend on it.

    host: Pooler.start(num_tokens)          the request enters the batch; again from the start after a preemption
    host: PoolingState.add(hidden, range)   after each step that computed some of the prompt, in order of positions
    host: PoolingState.finish()             once, when the last token of the prompt is computed

The host then cuts the result to `PoolingParams.dimensions` and normalizes it (embed, token_embed), or applies the
activation (classify, token_classify). All of it runs on the rank that answers; hidden states are whole there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.needs import among, compared, informs
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PoolerCapabilities:
    """What a pooler can do."""

    tasks: frozenset[str] = frozenset()
    """Those of `TASKS` that it serves."""
    modes: frozenset[str] = frozenset()
    """Names of its way of pooling in a checkpoint's files (sentence-transformers' `pooling_mode`): "lasttoken", "mean",
    "cls". Where the checkpoint names one, `auto` takes a pooler that has it."""
    skips_prefix: bool = False
    """It needs the states of the last tokens alone, so that the prompt's beginning may come from the prefix cache, and
    pages may be swapped to the host. Otherwise every state of the prompt is computed and handed over."""


@dataclass(frozen=True, kw_only=True)
class PoolerNeed:
    """What is asked of a pooler; the argument of `check`."""

    task: str = field(metadata=compared("tasks", among, "{name} serves the pooling tasks {has}, not {asked}."))
    hidden_size: int = field(metadata=informs("a pooler takes states of any size"))
    num_labels: int = field(
        default=0, metadata=informs("tasks that need labels are not asked about where the checkpoint has none")
    )
    """Labels of the checkpoint's score head; 0: it has none."""
    mode: str | None = field(
        default=None, metadata=informs("`auto` compares it with `modes`; a name in the config wins")
    )
    """How the model's states are pooled, by its files or as is usual for its kind; None: nothing is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolerSetup:
    """What a pooler is created with, in each worker that answers."""

    need: PoolerNeed
    score: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The checkpoint's score head: states [n, hidden_size], as `add` is given them -> float32 [n, num_labels], before
    the activation. None where it has none."""


class PoolingState(ABC):
    """What a pooler keeps of one request between its steps."""

    @abstractmethod
    def add(self, hidden: torch.Tensor, positions: range) -> None:
        """Takes the states of the next tokens of the prompt.

        Args:
            hidden: [n, hidden_size], on the model's device and in its dtype: output of the final norm. The memory is
                the host's and changes after the call, so what is kept must be copied.
            positions: The n consecutive positions of these tokens. The first call begins at 0, and each other one where
                the call before ended; with `skips_prefix` the first may begin anywhere.
        """

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """Returns the result, on any device: for `EMBED` and `CLASSIFY` [n], for `TOKEN_EMBED` and `TOKEN_CLASSIFY`
        [tokens, n], with n = hidden_size, or n = num_labels for the tasks with labels. Sums and means are taken in
        float32 or better. The last call."""


class Pooler(Plugin):
    """A way of making one result of a prompt's hidden states. One instance serves all requests of one task."""

    capabilities: ClassVar[PoolerCapabilities] = PoolerCapabilities()

    def __init__(self, options: PluginOptions, setup: PoolerSetup):
        self.options = options
        self.setup = setup

    @abstractmethod
    def start(self, num_tokens: int) -> PoolingState:
        """Returns the state of a new request, whose prompt has `num_tokens` tokens. Requests share nothing. An error of
        the state fails its request and no other."""
