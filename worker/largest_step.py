"""The largest step that a config allows: run once, it shows how much memory steps take, on top of weights and KV pages.

It goes through the sampler and the verifier themselves, with as many rows of logits as a step can have, since what they
keep of each row (the logits, a copy with penalties, the target's and the drafts' distributions) grows with the rows, to
gigabytes for a vocabulary of 128k. What they compute of the rows does not: they do it in groups (`row_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.model import CausalLM
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.speculation import AcceptanceRule, Draft
from dovetail.contracts.step import NewRequest
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.forward import EagerForward
from dovetail.worker.input_batch import StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier


@dataclass(frozen=True)
class DraftRows:
    """Drafts of one kind, as many as a step can have to verify."""

    counts: tuple[int, ...]
    """By request."""
    has_probs: bool
    """Whether they come with the distributions that they were drawn from."""

    @property
    def num_rows(self) -> int:
        """Rows of logits on which they are judged."""
        return sum(self.counts) + len(self.counts)


def largest_drafts(config: ResolvedConfig, plugins: LoadedPlugins) -> list[DraftRows]:
    """The longest drafts of the drafters that give distributions, and of those that do not."""
    speculation, limits = config.speculation, config.limits
    if speculation is None:
        return []
    longest: dict[bool, int] = {}
    for drafter in speculation.drafters.values():
        plugin, _ = plugins.get(drafter.component)
        draws = plugin.capabilities.probabilities
        longest[draws] = max(longest.get(draws, 0), drafter.num_tokens)
    most = limits.max_num_seqs
    if speculation.disable_by_batch_size is not None:
        most = min(most, speculation.disable_by_batch_size)
    return [DraftRows(drafts_by_request(num, most, limits), draws) for draws, num in sorted(longest.items())]


def drafts_by_request(num_drafts: int, num_requests: int, limits: SchedulerLimits) -> tuple[int, ...]:
    """As many requests as there may be, each with all its drafts, and a last one with those that
    max_num_batched_tokens still allows."""
    size = min(num_drafts + 1, limits.max_model_len)
    whole, rest = divmod(min(limits.max_num_batched_tokens, num_requests * size), size)
    return (size - 1,) * whole + ((rest - 1,) if rest > 1 else ())


def largest_inputs(limits: SchedulerLimits, max_model_len: int, layout: KVLayout) -> StepInputs:
    """Prompts as long as may be, max_num_batched_tokens in all, whose pages are all block 0."""
    total = limits.max_num_batched_tokens
    lengths = [max_model_len] * (total // max_model_len)
    if total % max_model_len:
        lengths.append(total % max_model_len)
    counts = np.array(lengths[: limits.max_num_seqs], dtype=np.int32)
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    table = np.zeros((len(counts), layout.blocks_for(int(counts.max()))), dtype=np.int32)
    slots = positions % layout.block_size
    return StepInputs(
        rows=np.arange(len(counts)),
        query_start=query_start,
        seq_lens=counts,
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        block_tables=[table for _ in layout.groups],
        slot_mappings=[slots for _ in layout.groups],
        num_drafts=np.zeros_like(counts),
        reaches_end=np.ones(len(counts), dtype=bool),
    )


class LargestStep:
    """Made for one run, by `Device.measure`."""

    def __init__(
        self,
        model: CausalLM,
        forward: EagerForward,
        inputs: StepInputs,
        limits: SchedulerLimits,
        vocab_size: int,
        operators: Operators,
        *,
        rule: AcceptanceRule | None = None,
        drafts: Sequence[DraftRows] = (),
        has_processors: bool = False,
    ):
        """`rule`: one that judges nothing else, needed where there are `drafts`; `has_processors`: whether rows are
        shown to logits processors."""
        self._model = model
        self._forward = forward
        self._inputs = inputs
        self._max_num_seqs = limits.max_num_seqs
        self._vocab_size = vocab_size
        self._operators = operators
        self._rule = rule
        self._drafts = drafts
        self._processors: Mapping[str, LogitsProcessor] = {"any": _Onlooker(vocab_size)} if has_processors else {}

    @torch.inference_mode()
    def run(self, device: torch.device) -> None:
        """The forward pass, while drafts of the step before are kept; then one draw for each of max_num_seqs requests;
        then the drafts are judged. What drafters compute afterwards is left out, as it is less: models of their own are
        smaller than the target, and new drafts come from fewer rows of logits than those on which drafts are judged."""
        drafted = [self._drafted(drafts, device) for drafts in self._drafts]
        ids, positions = (torch.from_numpy(a).to(device) for a in (self._inputs.input_ids, self._inputs.positions))
        hidden, _layer_states = self._forward.run(self._inputs, ids, positions)  # both are kept to the step's end
        self._sample(hidden)
        for requests in drafted:
            self._verify(hidden, requests)

    def _sample(self, hidden: torch.Tensor) -> None:
        count = min(self._max_num_seqs, len(hidden))
        sampler = self._sampler(count)
        sampler.sample(self._logits(hidden, count), list(range(count)), np.ones(count, dtype=np.int64))

    def _verify(self, hidden: torch.Tensor, requests: Sequence[DraftedRequest]) -> None:
        assert self._rule is not None
        num_rows = sum(len(request.draft.token_ids) + 1 for request in requests)
        Verifier(self._rule, self._sampler(len(requests))).verify(self._logits(hidden, num_rows), requests)

    def _logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Of `count` rows, which are gathered as in a step."""
        wanted = hidden[torch.arange(count, device=hidden.device)]
        # Zeros take as much memory, and are never NaN, from which nothing can be drawn.
        return self._model.compute_logits(wanted).zero_()

    def _sampler(self, count: int) -> Sampler:
        """With requests that take the most: penalties a copy of the logits, and a top_k that the highest few logits
        never settle a sort of whole rows."""
        sampler = Sampler(self._vocab_size, count, self._processors, self._operators)
        params = SamplingParams(
            temperature=1.0, top_k=max(1, self._vocab_size - 1), top_p=0.9, presence_penalty=0.5, max_tokens=None
        )
        for seq_id in range(count):
            sampler.add(NewRequest(seq_id, str(seq_id), [0], 1, 0, ([],), params, seed=seq_id))
        return sampler

    def _drafted(self, drafts: DraftRows, device: torch.device) -> list[DraftedRequest]:
        requests = []
        for seq_id, count in enumerate(drafts.counts):
            probs = torch.full((count, self._vocab_size), 1 / self._vocab_size, device=device)
            draft = Draft([0] * count, probs=probs if drafts.has_probs else None)
            requests.append(DraftedRequest(seq_id, 1, draft))
        return requests


class _Onlooker(LogitsProcessor):
    """Is shown a copy of every row, as processors are."""

    def __init__(self, vocab_size: int):
        super().__init__(PluginOptions(), LogitsSetup(vocab_size, (), None))

    def add_request(self, request: LogitsRequest) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        return None
