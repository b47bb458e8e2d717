"""What each rank will hold, where it will be, and the messages of one step, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import ANSWERING_TENSOR_RANK, Executor, ExpectedWorkers
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.model import ModelFamily
from dovetail.registry.calls import calling
from dovetail.registry.components import create_class
from dovetail.worker.estimate import MemoryEstimate, StageEstimate

if TYPE_CHECKING:
    from dovetail.nn.collectives import Collective

_TOKEN_BYTES = 8


@dataclass(frozen=True)
class StepMessages:
    """Messages of one kind that a rank sends, receives or takes part in, in each step."""

    kind: str
    """"plan" and "result", between the engine and the rank; "receive" and "send", states from and to the neighbouring
    pipeline stage; "all_reduce", "all_gather" and "broadcast", collectives of the ranks that share a stage's layers."""
    count: int
    """In a step in which requests get tokens; one that only computes parts of prompts has no "all_gather", and no
    "broadcast" but that of drafts. With a drafter, a step that has both requests with and without drafts has one
    "all_gather" and one "broadcast" more; log probabilities of prompts are gathered besides."""
    bytes_per_token: int | None = 0
    """Bytes of the rank's own tensors, together, for each token that the step computes; None: not known before."""
    bytes_per_request: int | None = 0
    """For each request that gets tokens in the step, besides; with a drafter where it drafts as much as it may."""

    def num_bytes(self, num_tokens: int, num_requests: int) -> int | None:
        """Returns the bytes of a step of so many tokens in which so many requests get tokens."""
        if self.bytes_per_token is None or self.bytes_per_request is None:
            return None
        return self.bytes_per_token * num_tokens + self.bytes_per_request * num_requests


@dataclass(frozen=True)
class RankEstimate:
    """One rank."""

    rank: int
    stage: int
    tensor_rank: int
    answers: bool
    """Whether it samples, drafts and returns the results."""
    node: str
    """Its machine, in words; "" where it is not known before the start."""
    device: str
    """As torch names it on its machine; "" where it is not known."""
    first_layer: int
    num_layers: int
    weight_bytes: int
    """Weights of the model, those of drafters, copies for these, and slots for adapters."""
    kv_bytes_per_token: int
    kv_bytes: int | None
    """KV memory that requests can use; None where it is known only once the weights are loaded."""
    transport: str | None
    """What carries plan and result, in words; "" where the worker is called; None: not known."""
    messages: tuple[StepMessages, ...]


def estimate_ranks(resolved: ResolvedConfig, memory: MemoryEstimate) -> tuple[RankEstimate, ...]:
    """Returns an estimate of every rank, in rank order. Raises `PluginError` where the executor describes other
    workers than it is asked for."""
    workers = _expected_workers(resolved)
    stages = memory.stages or (_only_stage(resolved, memory),)
    num_blocks = _num_blocks(resolved, memory)
    calls = [_collectives(resolved, stage) for stage in range(len(stages))]
    found = []
    for placement in workers.layout.placements([""] * workers.layout.num_ranks):
        stage, rank = stages[placement.stage], placement.rank
        # Drafters and what they hold are on the rank that answers.
        drafting = memory.draft_weight_bytes + memory.target_copy_bytes if placement.answers else 0
        per_token = stage.kv_bytes_per_token + (memory.draft_bytes_per_token if placement.answers else 0)
        counts = _Messages(resolved, stage, workers, placement.stage, placement.tensor_rank)
        found.append(
            RankEstimate(
                rank=rank,
                stage=placement.stage,
                tensor_rank=placement.tensor_rank,
                answers=placement.answers,
                node=workers.node(rank),
                device=workers.device(rank),
                first_layer=stage.first_layer,
                num_layers=stage.num_layers,
                weight_bytes=stage.weight_bytes + drafting + memory.adapter_bytes,
                kv_bytes_per_token=per_token,
                kv_bytes=None if num_blocks is None else num_blocks * resolved.cache.block_size * per_token,
                transport=workers.transport,
                messages=counts.all(calls[placement.stage]),
            )
        )
    return tuple(found)


def _expected_workers(resolved: ResolvedConfig) -> ExpectedWorkers:
    plugin, options = create_class(resolved.executor)
    name = f"executor {resolved.executor.name!r}"
    with calling(name, "expected_workers"):
        workers = cast(type[Executor], plugin).expected_workers(resolved.executor_need(), options)
    shape = workers.layout.num_stages, workers.layout.tensor_parallel
    if shape != (resolved.num_stages, resolved.tensor_parallel):
        raise PluginError(
            f"{name} expects {shape[0]} stages of {shape[1]} workers, and is asked for {resolved.num_stages} of"
            f" {resolved.tensor_parallel}: correct its expected_workers()"
        )
    return workers


def _only_stage(resolved: ResolvedConfig, memory: MemoryEstimate) -> StageEstimate:
    return StageEstimate(
        first_layer=0,
        num_layers=resolved.model.size.num_layers,
        num_ranks=resolved.tensor_parallel,
        weight_bytes=memory.weight_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token - memory.draft_bytes_per_token,
        sent_bytes_per_token=0,
    )


def _num_blocks(resolved: ResolvedConfig, memory: MemoryEstimate) -> int | None:
    """KV blocks of every rank that requests can get."""
    return None if memory.kv_tokens is None else memory.kv_tokens // resolved.cache.block_size


def _collectives(resolved: ResolvedConfig, stage: int) -> tuple[Collective, ...]:
    """Those of the model's own modules, of one pass through a stage."""
    if resolved.tensor_parallel == 1:
        return ()
    from dovetail.nn.collectives import planned_collectives  # needs torch, which most commands do without
    from dovetail.nn.planning import planning_context

    context = replace(
        planning_context(resolved.tensor_parallel),
        layers=resolved.layers_of_stage(stage),
        is_first_stage=stage == 0,
        is_last_stage=stage == resolved.num_stages - 1,
    )
    plugin, options = create_class(resolved.model_family)
    with calling(f"model_family {resolved.model_family.name!r}", "create"):
        return planned_collectives(cast(type[ModelFamily], plugin)(options), resolved.model.hf_config, context)


@dataclass(frozen=True)
class _Messages:
    """Counts the messages of one rank."""

    resolved: ResolvedConfig
    own: StageEstimate
    workers: ExpectedWorkers
    stage: int
    tensor_rank: int

    def all(self, calls: Sequence[Collective]) -> tuple[StepMessages, ...]:
        """Those that there are, in the order of a step. `calls`: of the model's modules."""
        plan, result = self._of_executor()
        receive, send = self._of_states()
        found = (plan, receive, *self._of_modules(calls), self._broadcasts(), send, result)
        return tuple(one for one in found if one.count)

    @property
    def _is_last(self) -> bool:
        return self.stage == self.resolved.num_stages - 1

    @property
    def _makes_text(self) -> bool:
        return not (self.resolved.model.size.is_encoder or self.resolved.pooling.num_labels)

    @property
    def _max_drafts(self) -> int:
        speculation = self.resolved.speculation
        return 0 if speculation is None else max(one.num_tokens for one in speculation.drafters.values())

    def _of_executor(self) -> tuple[StepMessages, StepMessages]:
        has_messages = self.workers.transport != ""
        answers = self._is_last and self.tensor_rank == ANSWERING_TENSOR_RANK
        return (
            StepMessages("plan", int(has_messages), None, None),
            StepMessages("result", int(has_messages and answers), None, None),
        )

    def _of_states(self) -> tuple[StepMessages, StepMessages]:
        """States between stages, and those between layers for drafters, in one message."""
        first = self.own.first_layer
        return (
            StepMessages("receive", int(self.stage > 0), self._state_bytes(first)),
            StepMessages("send", int(not self._is_last), self._state_bytes(first + self.own.num_layers)),
        )

    def _state_bytes(self, end: int) -> int:
        """Bytes for each token of what passes between the layers before `end` and that one."""
        model, speculation = self.resolved.model, self.resolved.speculation
        drafters = speculation.drafters.values() if speculation is not None else ()
        wanted = {layer for drafter in drafters for layer in drafter.hidden_layers if layer < end}
        num_states = 1 + (len(wanted) if self.tensor_rank == ANSWERING_TENSOR_RANK else 0)
        return num_states * model.size.hidden_size * DTYPE_BYTES[model.dtype]

    def _of_modules(self, calls: Sequence[Collective]) -> tuple[StepMessages, ...]:
        each = DTYPE_BYTES[self.resolved.model.dtype]
        sums = [call.width for call in calls if call.part != "output"]
        outputs = [call.width for call in calls if call.part == "output" and self._makes_text]
        rows = 1 + self._max_drafts
        return (
            StepMessages("all_reduce", len(sums), sum(sums) * each),
            StepMessages("all_gather", len(outputs), 0, sum(outputs) * each * rows),
        )

    def _broadcasts(self) -> StepMessages:
        """Sampled tokens; with a drafter, which drafts are accepted, and those for the next step."""
        if self.resolved.tensor_parallel == 1 or not (self._is_last and self._makes_text):
            return StepMessages("broadcast", 0)
        most = self._max_drafts
        if most == 0:
            return StepMessages("broadcast", 1, 0, _TOKEN_BYTES)
        verdict, drafts = 2 + most, 1 + 2 * most
        return StepMessages("broadcast", 2, 0, (verdict + drafts) * _TOKEN_BYTES)
