"""Logits processor: what may be sampled.

Processors named in the config are created once, on the rank that samples. They see the logits in float32 after the
penalties and masks of `SamplingParams` and before temperature, for every row from which a token is drawn
or a draft is verified: nothing is applied to the bonus token alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LogitsSetup:
    """Facts about the model that a processor may need."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str | None
    """The tokenizer in the `tokenizers` library's JSON form, where there is one."""


@dataclass(frozen=True)
class LogitsRequest:
    """A sequence, as processors see it when it arrives: one of the `n` completions of a request."""

    seq_id: int
    """Its number among the engine's sequences. A preempted sequence leaves, and comes back with the same."""
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    options: Any
    """What the request gives under `SamplingParams.processors[name]`; None if it does not name the processor."""


@dataclass(frozen=True)
class LogitsRow:
    """One row of logits: the distribution of the token that follows `output_token_ids`."""

    seq_id: int
    output_token_ids: Sequence[int]
    """Output so far; in a verify step, with the drafts that lead to this row."""


class LogitsProcessor(Plugin):
    """Changes logits of the requests that it wants to see."""

    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        self.options = options
        self.setup = setup

    def validate(self, options: Any) -> None:
        """Checks what a request gives for this processor. Raises `RequestError`. Called in the engine process before
        the request is accepted, on an instance made for that purpose."""
        return None

    @abstractmethod
    def add_request(self, request: LogitsRequest) -> bool:
        """A request arrives in the worker. False: never show its rows."""

    def remove_request(self, seq_id: int) -> None:
        """The request left. Called only for requests that were wanted."""
        return None

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        """Changes `logits` (float32 [len(rows), vocab_size]) in place. A processor that raises fails the requests in
        `rows`, and no other."""
