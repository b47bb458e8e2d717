"""The forward pass of a step: planned and issued anew, or as the replay of a captured graph."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch
from dovetail.contracts.device import Device, Graph, Runtime
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.model import CausalLM
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.nn.attention import Attention
from dovetail.runner.graph_ladder import (
    GraphLadder,
    GraphShape,
    PaddedStep,
    check_sizes,
    dummy_step,
    ladder_sizes,
    padded,
)
from dovetail.runner.input_batch import StepInputs

logger = logging.getLogger(__name__)

ModelForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`CausalLM.forward`, compiled or not."""


class ForwardPass(ABC):
    """From a step's inputs to hidden states. Called inside work that was launched."""

    @abstractmethod
    def run(self, inputs: StepInputs, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] token ids and positions on the device -> hidden states [T, hidden_size]; they stand until the
        next call."""

    def prepare(self) -> None:
        """Captures what is to be captured; again after memory has moved."""
        return None


class EagerForward(ForwardPass):
    """Plans attention and calls the model."""

    def __init__(self, forward: ModelForward, backends: Sequence[AttentionBackend]):
        self._forward = forward
        self._backends = backends

    def run(self, inputs: StepInputs, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As the base says."""
        longest_query = int(np.diff(inputs.query_start).max())
        longest = int(inputs.seq_lens.max())
        for group, backend in enumerate(self._backends):
            backend.plan(
                AttentionBatch(
                    query_start=inputs.query_start,
                    seq_lens=inputs.seq_lens,
                    block_table=inputs.block_tables[group],
                    slot_mapping=inputs.slot_mappings[group],
                    max_query_len=longest_query,
                    max_seq_len=longest,
                    tree_masks=inputs.tree_masks,
                )
            )
        return self._forward(ids, positions)


class GraphForward(ForwardPass):
    """Replays a graph where one of the ladder's shapes holds the step, and is eager elsewhere.

    All graphs read token ids and positions from one place and write hidden states to another, and share the memory
    of what stands between, so that the largest decides what they cost.
    """

    def __init__(
        self,
        device: Device,
        eager: EagerForward,
        forward: ModelForward,
        backends: Sequence[AttentionBackend],
        ladder: GraphLadder,
        max_model_len: int,
    ):
        self._device = device
        self._eager = eager
        self._forward = forward
        self._backends = backends
        self._ladder = ladder
        self._max_model_len = max_model_len
        self._block_size = backends[0].setup.block_size
        num_tokens = max(shape.num_tokens for shape in ladder.shapes)
        self._inputs = torch.zeros(2, num_tokens, dtype=torch.int64, device=device.torch_device)
        self._outputs: dict[GraphShape, torch.Tensor] = {}
        self._graphs: dict[GraphShape, Graph] = {}
        self.num_replays = 0
        """Steps that ran as a graph so far."""

    def prepare(self) -> None:
        """Captures every shape, largest first, so that smaller ones fit into its memory."""
        self._graphs.clear()
        self._outputs.clear()
        for shape in sorted(self._ladder.shapes, key=lambda shape: shape.num_tokens, reverse=True):
            step = dummy_step(shape, len(self._backends), self._max_model_len, self._block_size)
            self._device.launch(lambda step=step, shape=shape: self._warm_up(step, shape))  # type: ignore[misc]
            self._device.synchronize()
            self._graphs[shape] = self._device.capture(lambda shape=shape: self._call(shape))  # type: ignore[misc]

    def run(self, inputs: StepInputs, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As the base says."""
        shape = self._ladder.choose(inputs)
        graph = self._graphs.get(shape) if shape is not None else None
        if shape is None or graph is None:
            return self._eager.run(inputs, ids, positions)
        step = padded(inputs, shape, self._block_size)
        self._plan(step, shape)
        if step.places[-1] + 1 == len(step.places):  # nothing is filled in between
            self._inputs[0, : len(ids)] = ids
            self._inputs[1, : len(ids)] = positions
            graph.replay()
            self.num_replays += 1
            return self._outputs[shape][: len(ids)]
        places = torch.from_numpy(step.places).to(self._inputs.device, non_blocking=True)
        self._inputs[0, places] = ids
        self._inputs[1, places] = positions
        graph.replay()
        self.num_replays += 1
        return self._outputs[shape][places]

    @torch.inference_mode()
    def _warm_up(self, step: PaddedStep, shape: GraphShape) -> None:
        """Once without capturing: kernels are compiled and libraries make their plans."""
        self._plan(step, shape)
        self._call(shape)

    @torch.inference_mode()
    def _call(self, shape: GraphShape) -> None:
        count = shape.num_tokens
        self._outputs[shape] = self._forward(self._inputs[0, :count], self._inputs[1, :count])

    def _plan(self, step: PaddedStep, shape: GraphShape) -> None:
        for group, backend in enumerate(self._backends):
            backend.plan(
                AttentionBatch(
                    query_start=step.query_start,
                    seq_lens=step.seq_lens,
                    block_table=step.block_tables[group],
                    slot_mapping=step.slot_mappings[group],
                    max_query_len=shape.query_len,
                    max_seq_len=int(step.seq_lens.max()),
                    is_for_graph=True,
                )
            )


def create_forward(
    device: Device,
    runtime: Runtime | None,
    model: CausalLM,
    backends: Sequence[AttentionBackend],
    limits: SchedulerLimits,
    query_lens: Sequence[int],
) -> ForwardPass:
    """The forward pass that a runtime asks for; `query_lens` are those of decode and verify steps.

    Raises `ConfigError` where batch sizes for graphs are given and cannot be had.
    """
    forward = model.forward if runtime is None else compiled(model, runtime.compile_mode)
    eager = EagerForward(forward, backends)
    if runtime is None or runtime.graphs == "off" or runtime.graphs == ():
        return eager
    is_given = runtime.graphs != "auto"
    problem = _against_graphs(backends)
    sizes = ladder_sizes(limits.max_num_seqs) if runtime.graphs == "auto" else list(runtime.graphs)
    problem = problem or check_sizes(sizes, limits.max_num_seqs)
    if problem is not None and is_given:
        raise ConfigError(f"executor.cuda_graphs {sizes}: {problem}")
    if problem is not None:
        logger.warning("steps run eagerly, without captured graphs: %s", problem)
        return eager
    ladder = GraphLadder(sizes, query_lens, limits.max_num_batched_tokens, limits.max_model_len)
    captured = GraphForward(device, eager, forward, backends, ladder, limits.max_model_len)
    try:
        captured.prepare()
    except Exception as error:
        if is_given:
            raise ConfigError(
                f"executor.cuda_graphs {sizes}: capturing failed with {type(error).__name__}: {error}; set it to off"
            ) from error
        logger.warning("steps run eagerly: capturing a graph failed with %s: %s", type(error).__name__, error)
        return eager
    return captured


def compiled(model: CausalLM, mode: str | None) -> ModelForward:
    """The model's forward pass through torch.compile, for sizes that vary; None: as it is. Attention stays outside,
    since what its backend does depends on what was planned, which a compiler cannot see."""
    if mode is None:
        return model.forward
    assert isinstance(model, torch.nn.Module)
    for module in model.modules():
        if isinstance(module, Attention):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    made: ModelForward = torch.compile(model.forward, dynamic=True, mode=None if mode == "default" else mode)
    return made


def _against_graphs(backends: Sequence[AttentionBackend]) -> str | None:
    for backend in backends:
        if not backend.capabilities.graph_capture:
            return f"the attention backend {type(backend).__name__} cannot be captured"
    return None
