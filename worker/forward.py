"""The forward pass of a step: planned and issued anew, or as the replay of a captured graph."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch
from dovetail.contracts.device import Device, Graph, Runtime
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv import LayerCache, StateSpec
from dovetail.contracts.model import CausalLM, ModelInputs
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.nn.attention import Attention
from dovetail.nn.kernels import packed_kernels
from dovetail.nn.replay import ReplayedForward
from dovetail.worker.graph_ladder import (
    GraphLadder,
    GraphShape,
    PaddedStep,
    check_sizes,
    dummy_step,
    ladder_sizes,
    padded,
)
from dovetail.worker.input_batch import StepInputs

logger = logging.getLogger(__name__)

States = tuple[torch.Tensor, torch.Tensor | None]
"""Last hidden states [T, hidden_size], and those between layers that some drafter wants, side by side."""
ModelPass = Callable[[torch.Tensor, torch.Tensor], States]
"""From int64 [T] token ids and positions to states: one call of `CausalLM.forward`, compiled or not. Only tensors cross
it, so that it can be compiled, captured and replayed; the records of the contract are made inside."""


class ForwardPass(ABC):
    """From a step's inputs to hidden states. Called inside work that was launched."""

    @abstractmethod
    def run(self, inputs: StepInputs, ids: torch.Tensor, positions: torch.Tensor) -> States:
        """int64 [T] token ids and positions on the device -> hidden states, which are valid until the next call."""

    def prepare(self) -> None:
        """Captures what is to be captured; again after memory has moved, or weights were read anew."""
        return None

    def release(self) -> None:
        """Drops what was captured and the memory that it holds; `prepare` comes before the next `run`."""
        return None


class EagerForward(ForwardPass):
    """Plans attention and calls the model."""

    def __init__(self, forward: ModelPass, backends: Mapping[int, AttentionBackend]):
        """`backends`: by KV group."""
        self._forward = forward
        self._backends = backends

    def run(self, inputs: StepInputs, ids: torch.Tensor, positions: torch.Tensor) -> States:
        longest_query = int(np.diff(inputs.query_start).max())
        longest = int(inputs.seq_lens.max())
        for group, backend in self._backends.items():
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


class RepeatingForward(EagerForward):
    """Eager on a CPU, where passes that are nothing but native kernels are recorded and repeated."""

    def __init__(self, model: CausalLM, backends: Mapping[int, AttentionBackend]):
        super().__init__(_repeated(model), backends)
        self._model = model

    def prepare(self) -> None:
        """Forgets the recordings: they hold the addresses of weights."""
        self._forward = _repeated(self._model)


class GraphForward(ForwardPass):
    """Replays a graph where one of the ladder's shapes holds the step, and is eager elsewhere.

    All graphs read token ids and positions from the same tensors and share the memory of their intermediate results, so
    that the largest decides what they cost; each has hidden states of its own.
    """

    def __init__(
        self,
        device: Device,
        eager: EagerForward,
        forward: ModelPass,
        backends: Mapping[int, AttentionBackend],
        ladder: GraphLadder,
        max_model_len: int,
    ):
        self._device = device
        self._eager = eager
        self._forward = forward
        self._backends = backends
        self._ladder = ladder
        self._max_model_len = max_model_len
        self._block_size = next(iter(backends.values())).setup.block_size
        num_tokens = max(shape.num_tokens for shape in ladder.shapes)
        self._inputs = torch.zeros(2, num_tokens, dtype=torch.int64, device=device.torch_device)
        self._outputs: dict[GraphShape, torch.Tensor] = {}
        self._graphs: dict[GraphShape, Graph] = {}
        self.num_replays = 0
        """Steps that ran as a graph so far."""

    def prepare(self) -> None:
        """Captures every shape, largest first, so that smaller ones fit into its memory."""
        self.release()
        for shape in sorted(self._ladder.shapes, key=lambda shape: shape.num_tokens, reverse=True):
            step = dummy_step(shape, 1 + max(self._backends), self._max_model_len, self._block_size)
            self._device.launch(lambda step=step, shape=shape: self._warm_up(step, shape))  # type: ignore[misc]
            self._device.synchronize()
            self._graphs[shape] = self._device.capture(lambda shape=shape: self._call(shape))  # type: ignore[misc]

    def release(self) -> None:
        """All graphs, and the hidden states that they write."""
        self._graphs.clear()
        self._outputs.clear()

    def run(self, inputs: StepInputs, ids: torch.Tensor, positions: torch.Tensor) -> States:
        shape = self._ladder.choose(inputs)
        graph = self._graphs.get(shape) if shape is not None else None
        if shape is None or graph is None:
            return self._eager.run(inputs, ids, positions)
        step = padded(inputs, shape, self._block_size)
        self._plan(step, shape)
        if step.token_indices[-1] + 1 == len(step.token_indices):  # no padding between real tokens
            self._inputs[0, : len(ids)] = ids
            self._inputs[1, : len(ids)] = positions
            graph.replay()
            self.num_replays += 1
            return self._outputs[shape][: len(ids)], None
        indices = torch.from_numpy(step.token_indices).to(self._inputs.device, non_blocking=True)
        self._inputs[0, indices] = ids
        self._inputs[1, indices] = positions
        graph.replay()
        self.num_replays += 1
        return self._outputs[shape][indices], None

    @torch.inference_mode()
    def _warm_up(self, step: PaddedStep, shape: GraphShape) -> None:
        """Once without capturing: kernels are compiled and libraries make their plans."""
        self._plan(step, shape)
        self._call(shape)

    @torch.inference_mode()
    def _call(self, shape: GraphShape) -> None:
        count = shape.num_tokens
        self._outputs[shape], _ = self._forward(self._inputs[0, :count], self._inputs[1, :count])

    def _plan(self, step: PaddedStep, shape: GraphShape) -> None:
        for group, backend in self._backends.items():
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
    backends: Mapping[int, AttentionBackend],
    limits: SchedulerLimits,
    query_lens: Sequence[int],
    hidden_layers: Sequence[int] = (),
    *,
    caches: Sequence[LayerCache | None] = (),
    enforce_eager: bool = False,
) -> ForwardPass:
    """The forward pass that a runtime asks for.

    `query_lens`: of decode and verify steps; `hidden_layers`: those whose states drafters want, without graphs.
    `caches`: what the model's layers keep; with recurrent states nothing is recorded, since proving a recording runs a
    pass twice. `enforce_eager`: without a runtime, nothing is recorded; a runtime says so itself.

    Raises `ConfigError` where batch sizes for graphs are given and cannot be had.
    """
    mode = runtime.compile_mode if runtime is not None else None
    has_states = any(isinstance(cache, StateSpec) for cache in caches)
    may_repeat = not (hidden_layers or enforce_eager or has_states)
    if may_repeat and runtime is None and device.torch_device.type == "cpu":
        return RepeatingForward(model, backends)
    forward: ModelPass = compiled(model, model_pass(model, hidden_layers), mode)
    eager = EagerForward(forward, backends)
    if runtime is None or runtime.graphs == "off" or runtime.graphs == ():
        return eager
    is_given = runtime.graphs != "auto"
    sizes = ladder_sizes(limits.max_num_seqs) if runtime.graphs == "auto" else list(runtime.graphs)
    problem = check_sizes(sizes, limits.max_num_seqs) or _against_graphs(backends, hidden_layers)
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


def model_pass(model: CausalLM, hidden_layers: Sequence[int] = ()) -> ModelPass:
    """A pass that gives the states that enter `hidden_layers` as well, which ascend."""
    layers = tuple(hidden_layers)

    def run(ids: torch.Tensor, positions: torch.Tensor) -> States:
        outputs = model.forward(ModelInputs(input_ids=ids, positions=positions, layers=layers))
        return outputs.hidden, outputs.layer_states

    return run


def compiled(model: CausalLM, function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    """A pass of the model through torch.compile, for sizes that vary; None: as it is. Attention stays outside, since
    what its backend does depends on what was planned, which a compiler cannot see; and so do weights in oneDNN's own
    layout, which it takes for constants."""
    if mode is None:
        return function
    assert isinstance(model, torch.nn.Module)
    for module in model.modules():
        if isinstance(module, Attention):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
        for kernel in packed_kernels(module):
            kernel.apply = torch.compiler.disable(kernel.apply)  # type: ignore[method-assign,no-untyped-call]
    made: Callable[..., Any] = torch.compile(function, dynamic=True, mode=None if mode == "default" else mode)
    return made


def _repeated(model: CausalLM) -> ModelPass:
    """A pass without states between layers, which a recording does not keep."""
    run = model_pass(model)
    replayed = ReplayedForward(lambda ids, positions: run(ids, positions)[0])
    return lambda ids, positions: (replayed(ids, positions), None)


def _against_graphs(backends: Mapping[int, AttentionBackend], hidden_layers: Sequence[int]) -> str | None:
    if hidden_layers:
        return f"a drafter wants the states between the target's layers {list(hidden_layers)}, which graphs do not keep"
    for backend in backends.values():
        if not backend.capabilities.graph_capture:
            return f"the attention backend {type(backend).__name__} cannot be captured"
    return None
