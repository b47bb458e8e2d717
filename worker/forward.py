"""The forward pass of a step: planned and issued anew, or as the replay of a captured graph."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch, TransientSpec
from dovetail.contracts.device import Device, Graph, Runtime
from dovetail.contracts.errors import CapacityError, ConfigError, WorkerError
from dovetail.contracts.kv import LayerCache, StateSpec
from dovetail.contracts.model import AdapterRows, CausalLM, ModelInputs
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.nn.attention import Attention
from dovetail.nn.encoder_attention import EncoderAttention
from dovetail.nn.host_copies import on_device
from dovetail.nn.kernels import packed_kernels
from dovetail.nn.replay import Replay, record
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
from dovetail.worker.stage_link import StageLink

logger = logging.getLogger(__name__)

MAX_REPEATED_ROWS = 64
"""Passes of more rows are not recorded: there the kernels themselves take the time."""

_PassKey = tuple[int, int, int]
"""Rows of a recorded pass, threads that it runs on, and number of its inputs: with adapters there is one more."""
Backends = Mapping[int, AttentionBackend]
"""By KV group; that of layers that keep nothing under `NO_GROUP`."""
States = tuple[torch.Tensor, torch.Tensor | None]
"""Last hidden states [T, hidden_size], and those between layers that some drafter wants, side by side."""
ModelPass = Callable[..., States]
"""From int64 [T] token ids and positions to states: one call of `CausalLM.forward`, compiled or not; where some token
has an adapter, with int32 [T] slots as third argument, and where tokens have types, with int64 [T] `token_types`. Only
tensors cross it, so that it can be compiled, captured and replayed; the records of the contract are made inside. On a
pipeline stage behind the first, the states [T, hidden_size] of the stage before take the place of the ids."""


class ForwardPass(ABC):
    """From a step's inputs to hidden states. Called inside work that was launched."""

    @abstractmethod
    def run(self, inputs: StepInputs, entering: torch.Tensor, positions: torch.Tensor) -> States:
        """What enters the first layer (`StageLink.entering`) and int64 [T] positions, on the device -> hidden states,
        which are valid until the next call."""

    def prepare(self) -> None:
        """Captures what is to be captured; again after memory has moved, or weights were read anew."""
        return None

    def release(self) -> None:
        """Drops what was captured and the memory that it holds; `prepare` comes before the next `run`."""
        return None


class EagerForward(ForwardPass):
    """Plans attention and calls the model."""

    def __init__(self, forward: ModelPass, backends: Backends):
        self._forward = forward
        self._backends = backends

    def run(self, inputs: StepInputs, entering: torch.Tensor, positions: torch.Tensor) -> States:
        _plan(self._backends, inputs)
        slots = _adapter_slots(inputs, positions.device)
        if inputs.token_types is None:
            return self._forward(entering, positions, *slots)
        types = on_device(inputs.token_types, positions.device)
        return self._forward(entering, positions, *slots, token_types=types)


class RepeatingForward(ForwardPass):
    """As `EagerForward` on a CPU, where passes that are nothing but native kernels are recorded and repeated.

    For each number of rows, with and without adapters: the first pass runs as it is, the second is recorded, the third
    is replayed and compared, and those after it are replayed. Where one cannot be recorded, or came out different, all
    run as they are from then on. Weights may be loaded again, since kernels keep their memory (`LinearKernel.load`).
    """

    def __init__(self, forward: Callable[..., torch.Tensor], backends: Backends):
        """`forward`: as a `ModelPass`, but for states between layers, which a recording does not keep."""
        self._forward = forward
        self._backends = backends
        self.prepare()

    def run(self, inputs: StepInputs, entering: torch.Tensor, positions: torch.Tensor) -> States:
        _plan(self._backends, inputs)
        return self.repeat(entering, positions, *_adapter_slots(inputs, positions.device)), None

    def prepare(self) -> None:
        """Forgets the recordings: they hold addresses of memory that may have moved."""
        self._seen: set[_PassKey] = set()
        self._replays: dict[_PassKey, Replay] = {}
        self._proven: set[_PassKey] = set()
        self.refusal: str | None = None
        """Why passes are not replayed; None while they are."""

    def repeat(self, *inputs: torch.Tensor) -> torch.Tensor:
        """As `ModelPass`: what enters, int64 [T], perhaps int32 [T] -> [T, hidden_size]; the result of a replay is
        valid until the next one."""
        num_rows = len(inputs[0])
        if self.refusal is not None or not 0 < num_rows <= MAX_REPEATED_ROWS:
            return self._forward(*inputs)
        key = num_rows, torch.get_num_threads(), len(inputs)
        replay = self._replays.get(key)
        if replay is None:
            return self._record(key, inputs)
        for kept, given in zip(replay.inputs, inputs, strict=True):
            kept.copy_(given)
        return replay.run() if key in self._proven else self._compare(key, replay, inputs)

    def _record(self, key: _PassKey, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if key not in self._seen:
            self._seen.add(key)
            return self._forward(*inputs)
        output, replay = record(self._forward, tuple(tensor.clone() for tensor in inputs))
        if isinstance(replay, Replay):
            self._replays[key] = replay
        else:
            self._refuse(replay)
        return output

    def _compare(self, key: _PassKey, replay: Replay, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        # Both write the same keys and values to the same slots, so the order does not matter.
        replay.forget()
        replayed = replay.run()
        output = self._forward(*inputs)
        if torch.equal(output.view(torch.uint8), replayed.view(torch.uint8)):
            self._proven.add(key)
        else:
            self._refuse("a replayed pass came out different, so something in it computes beside the recorded kernels")
        return output

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._replays.clear()
        logger.debug("forward passes are not replayed: %s", reason)


class GraphForward(ForwardPass):
    """Replays a graph where one of the ladder's shapes holds the step, and is eager elsewhere.

    All graphs read what enters and the positions from the same tensors and share the memory of their intermediate
    results, so that the largest decides what they cost; each has hidden states of its own, and with them the states
    between layers that drafters want.
    """

    def __init__(
        self,
        device: Device,
        eager: EagerForward,
        forward: ModelPass,
        backends: Backends,
        ladder: GraphLadder,
        max_model_len: int,
        link: StageLink,
        has_adapters: bool = False,
    ):
        """`link`: what enters the first layer. `has_adapters`: every shape is captured twice, without and with
        adapters."""
        self._device = device
        self._eager = eager
        self._forward = forward
        self._backends = backends
        self._ladder = ladder
        self._max_model_len = max_model_len
        self._block_size = next(iter(backends.values())).setup.block_size
        num_tokens = max(shape.num_tokens for shape in ladder.shapes)
        self._entering = link.blank(num_tokens, device.torch_device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int64, device=device.torch_device)
        self._slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=device.torch_device)
        self._kinds = (True, False) if has_adapters else (False,)
        """Whether the passes of a graph have adapters."""
        self._outputs: dict[tuple[GraphShape, bool], States] = {}
        self._graphs: dict[tuple[GraphShape, bool], Graph] = {}
        self.num_replays = 0
        """Steps that ran as a graph so far."""

    def prepare(self) -> None:
        """Captures every shape, largest first, so that smaller ones fit into its memory.

        Raises `CapacityError` where memory does not suffice, `ConfigError` where the device captures nothing, and
        `WorkerError` for any other failure. A capture that was begun and fails, for want of memory too, leaves streams
        and allocator of the process in a state that nobody can rely on.
        """
        self.release()
        for shape, adapts in self._variants():
            self._capture(shape, adapts)

    def measure(self) -> int:
        """Bytes that `prepare` will take on the device: the two largest shapes are captured, and dropped again. The
        first makes the memory that all share; every further one is taken to need as much as the second. Raises as
        `prepare` does."""
        self.release()
        shapes = self._variants()
        free = [self._free_memory()]
        for shape, adapts in shapes[:2]:
            self._capture(shape, adapts)
            free.append(self._free_memory())
        self.release()
        self._device.release_unused()
        steps = [max(0, before - after) for before, after in itertools.pairwise(free)]
        return sum(steps) + sum(steps[1:]) * max(0, len(shapes) - 2)

    def _variants(self) -> list[tuple[GraphShape, bool]]:
        """What is captured, the largest first."""
        return [(shape, adapts) for shape in self._ladder.descending() for adapts in self._kinds]

    def _free_memory(self) -> int:
        """Bytes, those among them that an allocator keeps in a cache."""
        self._device.release_unused()
        return self._device.memory().free

    def _capture(self, shape: GraphShape, adapts: bool) -> None:
        step = dummy_step(shape, 1 + max(self._backends), self._max_model_len, self._block_size)
        self._device.launch(lambda: self._warm_up(step, shape, adapts))
        self._device.synchronize()
        try:
            self._graphs[shape, adapts] = self._device.capture(lambda: self._call(shape, adapts))
        except (CapacityError, ConfigError):
            raise
        except Exception as error:
            raise WorkerError(
                f"capturing a graph of {shape.num_requests} requests failed, and this process cannot be used any more: "
                f"{type(error).__name__}: {error}. Set executor.cuda_graphs to off; and report it, since the model "
                "family, the quantization method, the operators or the attention backend declares graph_capture"
            ) from error

    def release(self) -> None:
        """All graphs, and the hidden states that they write."""
        self._graphs.clear()
        self._outputs.clear()

    def run(self, inputs: StepInputs, entering: torch.Tensor, positions: torch.Tensor) -> States:
        shape = self._ladder.choose(inputs)
        adapts = inputs.adapter_slots is not None
        graph = self._graphs.get((shape, adapts)) if shape is not None else None
        if shape is None or graph is None:
            return self._eager.run(inputs, entering, positions)
        step = padded(inputs, shape, self._block_size)
        self._plan(step, shape)
        rows: slice | torch.Tensor = slice(len(positions))
        if step.token_indices[-1] + 1 != len(step.token_indices):  # padding between real tokens
            rows = on_device(step.token_indices, self._positions.device)
        self._entering[rows] = entering
        self._positions[rows] = positions
        for slots in _adapter_slots(inputs, positions.device):
            self._slots.fill_(-1)
            self._slots[rows] = slots
        graph.replay()
        self.num_replays += 1
        return _rows(self._outputs[shape, adapts], rows)

    @torch.inference_mode()
    def _warm_up(self, step: PaddedStep, shape: GraphShape, adapts: bool) -> None:
        """Once without capturing: kernels are compiled and libraries make their plans."""
        self._plan(step, shape)
        self._call(shape, adapts)

    @torch.inference_mode()
    def _call(self, shape: GraphShape, adapts: bool) -> None:
        count = shape.num_tokens
        slots = (self._slots[:count],) if adapts else ()
        self._outputs[shape, adapts] = self._forward(self._entering[:count], self._positions[:count], *slots)

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
    forward: ModelPass,
    backends: Backends,
    limits: SchedulerLimits,
    query_lens: Sequence[int],
    link: StageLink,
    hidden_layers: Sequence[int] = (),
    *,
    caches: Sequence[LayerCache | None] = (),
    enforce_eager: bool = False,
    obstacle: str | None = None,
    has_adapters: bool = False,
) -> ForwardPass:
    """The forward pass that a runtime asks for.

    `forward`: gives the states of `hidden_layers`, which drafters want. `query_lens`: of decode and verify steps.
    `link`: what enters the first layer.
    `caches`: what the model's layers keep; with recurrent states nothing is recorded, since proving a recording runs a
    pass twice, and of an encoder neither. `enforce_eager`: without a runtime, nothing is recorded; a runtime says so
    itself. `obstacle`: why steps of this model cannot be captured (`why_not_captured`). `has_adapters`: whether steps
    may have some.

    Raises `ConfigError` where batch sizes for graphs are given and cannot be had, and what `GraphForward.prepare` does.
    """
    # An encoder's passes are mostly of other lengths than before, and longer than those that are recorded.
    is_apart = any(isinstance(cache, StateSpec | TransientSpec) for cache in caches)
    may_repeat = not (hidden_layers or enforce_eager or is_apart)
    if may_repeat and runtime is None and device.torch_device.type == "cpu":
        return RepeatingForward(lambda *inputs: forward(*inputs)[0], backends)
    if runtime is None or not wants_graphs(runtime):
        return EagerForward(forward, backends)
    sizes = _sizes(runtime, limits)
    problem = check_sizes(sizes, limits.max_num_seqs) or obstacle
    if problem is not None and runtime.graphs != "auto":
        raise ConfigError(f"executor.cuda_graphs {sizes}: {problem}")
    if problem is not None:
        return _eager(forward, backends, problem)
    captured = create_graphs(device, runtime, forward, backends, limits, query_lens, link, has_adapters=has_adapters)
    try:
        captured.prepare()
    except ConfigError as error:
        if runtime.graphs != "auto":
            raise
        return _eager(forward, backends, error)
    return captured


def _eager(forward: ModelPass, backends: Backends, reason: object) -> EagerForward:
    """Where "auto" cannot have graphs."""
    logger.warning("steps run eagerly, without captured graphs: %s", reason)
    return EagerForward(forward, backends)


def create_graphs(
    device: Device,
    runtime: Runtime,
    forward: ModelPass,
    backends: Backends,
    limits: SchedulerLimits,
    query_lens: Sequence[int],
    link: StageLink,
    *,
    has_adapters: bool = False,
) -> GraphForward:
    """Graphs of the sizes that a runtime asks for; none is captured yet."""
    ladder = GraphLadder(_sizes(runtime, limits), query_lens, limits.max_num_batched_tokens, limits.max_model_len)
    eager = EagerForward(forward, backends)
    return GraphForward(device, eager, forward, backends, ladder, limits.max_model_len, link, has_adapters)


def wants_graphs(runtime: Runtime | None) -> bool:
    """Whether a runtime asks for graphs, where they can be had."""
    return runtime is not None and runtime.graphs not in ("off", ())


def _sizes(runtime: Runtime, limits: SchedulerLimits) -> list[int]:
    return ladder_sizes(limits.max_num_seqs) if runtime.graphs == "auto" else [int(size) for size in runtime.graphs]


def model_pass(model: CausalLM, hidden_layers: Sequence[int] = (), *, is_first_stage: bool = True) -> ModelPass:
    """A pass that gives the states that enter `hidden_layers` as well, which ascend."""
    layers = tuple(hidden_layers)

    def run(
        entering: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
    ) -> States:
        inputs = ModelInputs(
            input_ids=entering if is_first_stage else None,
            stage_input=None if is_first_stage else entering,
            positions=positions,
            layers=layers,
            adapters=None if slots is None else AdapterRows(slots=slots),
            token_types=token_types,
        )
        outputs = model.forward(inputs)
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
        if isinstance(module, Attention | EncoderAttention):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
        for kernel in packed_kernels(module):
            kernel.apply = torch.compiler.disable(kernel.apply)  # type: ignore[method-assign,no-untyped-call]
    made: Callable[..., Any] = torch.compile(function, dynamic=True, mode=None if mode == "default" else mode)
    return made


def _adapter_slots(inputs: StepInputs, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The third argument of a `ModelPass`, where it has one."""
    return () if inputs.adapter_slots is None else (on_device(inputs.adapter_slots, device),)


def _plan(backends: Backends, inputs: StepInputs) -> None:
    """Attention of a step that is not padded."""
    longest_query = int(np.diff(inputs.query_start).max())
    longest = int(inputs.seq_lens.max())
    for group, backend in backends.items():
        block_table, slot_mapping = inputs.pages_of(group)
        backend.plan(
            AttentionBatch(
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                block_table=block_table,
                slot_mapping=slot_mapping,
                max_query_len=longest_query,
                max_seq_len=longest,
                tree_masks=inputs.tree_masks,
            )
        )


def _rows(states: States, rows: slice | torch.Tensor) -> States:
    last, layers = states
    return last[rows], None if layers is None else layers[rows]
