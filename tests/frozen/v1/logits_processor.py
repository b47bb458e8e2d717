"""Bans the tokens that a request lists."""

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.plugin import PluginOptions


class Options(PluginOptions):
    always: tuple[int, ...] = ()


class Frozen(LogitsProcessor):
    contract = (1, 0)
    Options = Options
    preference = -100

    def __init__(self, options: Options, setup: LogitsSetup):
        super().__init__(options, setup)
        self._banned: dict[int, list[int]] = {}

    def validate(self, options: Any) -> None:
        if options is not None and not all(0 <= token < self.setup.vocab_size for token in options):
            raise RequestError(f"tokens are 0 to {self.setup.vocab_size - 1}, got {options}")

    def add_request(self, request: LogitsRequest) -> bool:
        banned = [*self.options.always, *(request.options or ())]
        if banned:
            self._banned[request.seq_id] = banned
        return bool(banned)

    def remove_request(self, seq_id: int) -> None:
        del self._banned[seq_id]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for index, row in enumerate(rows):
            logits[index, self._banned[row.seq_id]] = -torch.inf
