import torch
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.sampling import SamplingParams
from typing import Any


@dataclass(frozen=True)
class LogitsSetup:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str | None


@dataclass(frozen=True)
class LogitsRequest:
    seq_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    options: Any


@dataclass(frozen=True)
class LogitsRow:
    seq_id: int
    output_token_ids: Sequence[int]


class LogitsProcessor(Plugin):
    def __init__(self, options: PluginOptions, setup: LogitsSetup): ...
    options: PluginOptions
    setup: LogitsSetup
    def validate(self, options: Any) -> None: ...
    @abstractmethod
    def add_request(self, request: LogitsRequest) -> bool: ...
    def remove_request(self, seq_id: int) -> None: ...
    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None: ...
