"""From token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.contracts.quantization import LinearShape
from dovetail.nn.context import ModelContext
from dovetail.nn.kernels import plain_kernel
from dovetail.nn.loading import WeightHolder


class VocabEmbedding(WeightHolder):
    """Token embedding; each rank holds ceil(vocab_size / ranks) rows, the last one perhaps fewer."""

    def __init__(self, context: ModelContext, name: str, vocab_size: int, hidden_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.name = name
        self._rows = _vocab_rows(context, vocab_size)
        num_rows = -(-vocab_size // context.tp_size)
        # Rows that pad the last rank's share are zero, so that all ranks gather logits of one shape.
        self.weight = torch.zeros(num_rows, hidden_size, dtype=context.dtype, device=context.device)
        self._communicator = context.communicator
        self._sharded = context.tp_size > 1

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size], on every rank the whole."""
        if not self._sharded:
            return torch.nn.functional.embedding(input_ids, self.weight)
        foreign = (input_ids < self._rows.start) | (input_ids >= self._rows.stop)
        local = (input_ids - self._rows.start).masked_fill(foreign, 0)
        hidden = torch.nn.functional.embedding(local, self.weight).masked_fill(foreign[:, None], 0.0)
        return self._communicator.all_reduce(hidden)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight."""
        return {f"{self.name}.weight": (self.vocab_size, self.hidden_size)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps this rank's rows."""
        self.weight[: self._rows.stop - self._rows.start].copy_(tensor[self._rows])


class LMHead(WeightHolder):
    """Hidden states to logits of the whole vocabulary, on every rank.

    Given `tied`, an embedding, it multiplies with that embedding's weights and takes none itself.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: VocabEmbedding | None = None,
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._name = f"{name}.weight"
        self._rows = _vocab_rows(context, vocab_size)
        num_rows = -(-vocab_size // context.tp_size)
        shape = LinearShape(name, hidden_size, num_rows, has_bias=False)
        self._tied = tied
        self.kernel = context.create_kernel(shape) if tied is None else plain_kernel(tied.weight)
        self._num_rows = num_rows
        self._communicator = context.communicator
        self._sharded = context.tp_size > 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        logits = self.kernel.apply(hidden, None)
        if not self._sharded:
            return logits
        return self._communicator.all_gather(logits, dim=-1)[:, : self.vocab_size]

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight, unless it is tied."""
        return {} if self._tied is not None else {self._name: (self.vocab_size, self._hidden_size)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps this rank's rows."""
        share = tensor[self._rows]
        self.kernel.load(slice(0, len(share)), share)
        if len(share) < self._num_rows:
            padding = share.new_zeros(self._num_rows - len(share), self._hidden_size)
            self.kernel.load(slice(len(share), self._num_rows), padding)

    def finish(self) -> None:
        """Lets the kernel pack its weights; tied ones are packed from the embedding, which keeps its own."""
        if self._tied is not None:
            self.kernel = plain_kernel(self._tied.weight)
        self.kernel.finish()


def _vocab_rows(context: ModelContext, vocab_size: int) -> slice:
    """Rows of the vocabulary that this rank holds."""
    share = -(-vocab_size // context.tp_size)
    start = min(context.tp_rank * share, vocab_size)
    return slice(start, min(start + share, vocab_size))
