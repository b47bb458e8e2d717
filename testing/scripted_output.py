"""A logits processor that has a request say what it is told to, token by token, and then end.

In a config: `logits_processors: {script: "dovetail.testing.scripted_output:Script"}`; in a request:
`processors={"script": token_ids}`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.plugin import PluginOptions


class Script(LogitsProcessor):
    """The request's value: token ids."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self._scripts: dict[int, Sequence[int]] = {}

    def add_request(self, request: LogitsRequest) -> bool:
        """See `LogitsProcessor.add_request`."""
        if request.options is not None:
            self._scripts[request.seq_id] = request.options
        return request.options is not None

    def remove_request(self, seq_id: int) -> None:
        """See `LogitsProcessor.remove_request`."""
        del self._scripts[seq_id]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        """See `LogitsProcessor.apply`."""
        for index, row in enumerate(rows):
            script, at = self._scripts[row.seq_id], len(row.output_token_ids)
            token = script[at] if at < len(script) else self.setup.eos_token_ids[0]
            logits[index, :token] = logits[index, token + 1 :] = float("-inf")
