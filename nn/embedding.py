"""The token embedding and the output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.contracts.model import ModelContext
from dovetail.contracts.quantization import LinearKernel, LinearShape
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.collectives import CallsCollectives, Collective
from dovetail.nn.kernels import plain_kernel, unpacked
from dovetail.nn.loading import WeightHolder


class VocabEmbedding(WeightHolder, CallsCollectives):
    """Token embedding; each rank holds ceil(vocab_size / ranks) rows, the last one perhaps fewer.

    The table is a plain tensor, or a kernel of the quantization method where the method serves embeddings.
    """

    takes_packed = True

    def __init__(self, context: ModelContext, name: str, vocab_size: int, hidden_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.name = name
        self._rows = _vocab_rows(context, vocab_size)
        num_rows = -(-vocab_size // context.tp_size)
        self.kernel = context.create_embedding_kernel(LinearShape(name, hidden_size, num_rows, has_bias=False))
        """The quantized table; None where it is `weight`."""
        self._num_rows = num_rows
        self._dtype = context.dtype
        # Rows that pad the last rank's share are zero, so that all ranks gather logits of one shape.
        self.weight = torch.zeros(
            num_rows if self.kernel is None else 0, hidden_size, dtype=context.dtype, device=context.device
        )
        self._communicator = context.communicator
        self._sharded = context.tp_size > 1
        self._batch_invariant = context.batch_invariant

    def output_kernel(self) -> LinearKernel:
        """The kernel that multiplies with the table, for an output layer that is tied to the embedding."""
        if self.kernel is not None:
            return self.kernel
        return plain_kernel(self.weight, batch_invariant=self._batch_invariant)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Looks up embeddings: int64 [T] -> [T, hidden_size], the same on every rank."""
        if not self._sharded:
            return self._look_up(input_ids)
        foreign = (input_ids < self._rows.start) | (input_ids >= self._rows.stop)
        local = (input_ids - self._rows.start).masked_fill(foreign, 0)
        hidden = self._look_up(local).masked_fill(foreign[:, None], 0.0)
        return self._communicator.all_reduce(hidden)

    def collectives(self) -> tuple[Collective, ...]:
        """The sum of the ranks' rows."""
        return (Collective("all_reduce", self.hidden_size, "embedding"),) if self._sharded else ()

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None:
            return self.kernel.lookup(rows, self._dtype)
        # As `embedding` does, whose shapes alone (`nn.planning`) torch finds by importing sympy, for half a second.
        return self.weight.index_select(0, rows)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight."""
        return {f"{self.name}.weight": (self.vocab_size, self.hidden_size)}

    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None:
        """Keeps this rank's rows."""
        if self.kernel is not None:
            _load_rows(self.kernel, tensor, self._rows, self._num_rows)
        else:
            share = tensor[self._rows]
            self.weight[: share.shape[0]].copy_(unpacked(share))

    def finish(self) -> None:
        """Lets the kernel pack its weights."""
        if self.kernel is not None:
            self.kernel.finish()


class LMHead(WeightHolder, CallsCollectives):
    """Hidden states to logits of the whole vocabulary, on every rank.

    With `tied`, an embedding, the layer multiplies with the embedding's weights and has none itself. With `bias`, it
    adds one number for each token of the vocabulary.
    """

    takes_packed = True

    def __init__(
        self,
        context: ModelContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: VocabEmbedding | None = None,
        bias: bool = False,
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._name = f"{name}.weight"
        self._bias_name = f"{name}.bias"
        self.bias = context.empty(vocab_size) if bias else None
        self._rows = _vocab_rows(context, vocab_size)
        num_rows = -(-vocab_size // context.tp_size)
        shape = LinearShape(name, hidden_size, num_rows, has_bias=False)
        self._tied = tied
        self.kernel = context.create_kernel(shape) if tied is None else tied.output_kernel()
        self._num_rows = num_rows
        self._communicator = context.communicator
        self._sharded = context.tp_size > 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        logits = self.kernel.apply(hidden, None)
        if self._sharded:
            logits = self._communicator.all_gather(logits, dim=-1)[:, : self.vocab_size]
        return logits if self.bias is None else logits + self.bias

    def collectives(self) -> tuple[Collective, ...]:
        """The gathering of the logits."""
        return (Collective("all_gather", self._num_rows, "output"),) if self._sharded else ()

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight, unless the layer is tied, and the bias, if it has one."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self._tied is None:
            shapes[self._name] = (self.vocab_size, self._hidden_size)
        if self.bias is not None:
            shapes[self._bias_name] = (self.vocab_size,)
        return shapes

    def sources(self) -> Sequence[WeightHolder]:
        """The embedding that the layer is tied to."""
        return () if self._tied is None else (self._tied,)

    def load(self, name: str, tensor: torch.Tensor | PackedTensor) -> None:
        """Keeps this rank's rows of the weight, and all of the bias."""
        if self.bias is not None and name == self._bias_name:
            self.bias.copy_(unpacked(tensor))
        else:
            _load_rows(self.kernel, tensor, self._rows, self._num_rows)

    def finish(self) -> None:
        """Lets the kernel pack its weights. A tied layer packs a copy of a plain embedding's weights."""
        if self._tied is None:
            self.kernel.finish()
        elif self._tied.kernel is None:
            self.kernel.load(slice(0, self._num_rows), self._tied.weight)
            self.kernel.finish()


def _load_rows(kernel: LinearKernel, tensor: torch.Tensor | PackedTensor, rows: slice, num_rows: int) -> None:
    """Loads this rank's rows of `tensor` into `kernel`, which holds `num_rows` rows; the remaining rows are zeros."""
    share = tensor[rows]
    count, columns = share.shape
    kernel.load(slice(0, count), share)
    if count < num_rows:
        kernel.load(slice(count, num_rows), torch.zeros(num_rows - count, columns))


def _vocab_rows(context: ModelContext, vocab_size: int) -> slice:
    """Rows of the vocabulary that this rank holds."""
    share = -(-vocab_size // context.tp_size)
    start = min(context.tp_rank * share, vocab_size)
    return slice(start, min(start + share, vocab_size))
