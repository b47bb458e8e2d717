"""The drafters of a config, loaded with the target: what they cache, what their drafts take, and their start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dovetail.config.resolved import ResolvedConfig, ResolvedDrafter, ResolvedSpeculation
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.draft_length import AdaptiveDraftLength, DrafterFacts
from dovetail.contracts.draft_target import CopiesTarget
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.model import CausalLM
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.speculation import AcceptanceRule, Draft
from dovetail.nn.context import BuildContext
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.draft_tokenizers import DraftTokenizers
from dovetail.worker.input_batch import InputBatch
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.largest_step import JudgedRows
from dovetail.worker.machine.environment import detect_environment
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.drafters import bind_drafters, load_drafters, own_weights, update_target
from dovetail.worker.speculation.drafting import Drafting
from dovetail.worker.speculation.late_reading import LateReading
from dovetail.worker.speculation.layer_states import layer_states
from dovetail.worker.speculation.lengths import create_lengths
from dovetail.worker.speculation.loaded import LoadedSpeculation, unknown_drafter
from dovetail.worker.speculation.rules import Rules, create_rules
from dovetail.worker.speculation.speculation import Speculation
from dovetail.worker.speculation.target_copy import load_copy
from dovetail.worker.speculation.top_tokens import TopTokenRecords
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier
from dovetail.worker.speculation.waiting_states import WaitingStates
from dovetail.worker.weight_update.targets import UpdateTarget


class LoadedDrafters(LoadedSpeculation):
    """The drafters with their weights, on the rank that answers; the others have none, and verify with it."""

    def __init__(
        self,
        config: ResolvedConfig,
        section: ResolvedSpeculation,
        plugins: LoadedPlugins,
        model: CausalLM,
        context: BuildContext,
        tokenizers: DraftTokenizers,
        *,
        answers: bool,
    ):
        """`section`: that of `config`."""
        self._config = config
        self._section = section
        self._plugins = plugins
        self._model = model
        self._context = context
        self._answers = answers
        self.copy = load_copy(config, plugins, model, context) if answers else None
        self._drafters = (
            load_drafters(config, section, plugins, model, context, tokenizers, self.copy) if answers else {}
        )
        self._outdated: set[str] = set()
        """Drafters that have a copy of weights that the target has no more."""
        self.max_query_len = 1 + max(drafter.num_tokens for drafter in section.drafters.values())
        states = layer_states(section, context)
        self.hidden_layers = states.own
        self.num_earlier_states = states.num_earlier
        self.extra_caches = {
            name: tuple(layer.cache for layer in drafter.layers)
            for name, drafter in self._drafters.items()
            if drafter.layers
        }

    def largest_rows(self, device: torch.device) -> Sequence[JudgedRows]:
        """As `LoadedSpeculation.largest_rows`. What drafters compute afterwards is left out, as it is less: models of
        their own are smaller than the target, and new drafts come from fewer rows of logits than those on which drafts
        are judged."""
        drafts = largest_drafts(self._section, self._config.limits)
        rules = create_rules(self._section, self._plugins, self._context.operators)
        return [
            self._verification(rule, rows, device)
            for rule in (rules.default, *rules.others.values())
            for rows in drafts
        ]

    def update_target(self, drafter: str) -> UpdateTarget | None:
        """As `LoadedSpeculation.update_target`."""
        if drafter not in self._section.drafters:
            raise unknown_drafter(drafter, self._section.drafters)
        return update_target(drafter, self._drafters[drafter], self._plugins) if self._answers else None

    def weights(self, drafter: str) -> Iterable[torch.Tensor | torch.nn.Module]:
        """As `LoadedSpeculation.weights`."""
        return own_weights(self._drafters[drafter]) if drafter in self._drafters else ()

    def target_changed(self) -> None:
        """Tells the drafters that copied some of it; those that sleep, by `refresh`."""
        self._outdated = {name for name, one in self._drafters.items() if isinstance(one.worker, CopiesTarget)}
        self.refresh()

    def refresh(self) -> None:
        """As `LoadedSpeculation.refresh`."""
        with torch.inference_mode():
            for name in sorted(self._outdated - self.asleep):
                worker = self._drafters[name].worker
                assert isinstance(worker, CopiesTarget)
                worker.target_changed()
                self._outdated.discard(name)

    def start(
        self, layout: KVLayout, storage: KVStorage, batch: InputBatch, backends: Mapping[int, AttentionBackend]
    ) -> Speculation:
        """As `LoadedSpeculation.start`."""
        environment = detect_environment(self._config.device_type)
        bind_drafters(self._config, self._plugins, self._drafters, layout, storage, batch, environment, backends)
        section, context, plugins = self._section, self._context, self._plugins
        layers = [
            (group.group_id, context.attention_layers[layer_id])
            for group in layout.groups
            for layer_id in group.layer_ids
        ]
        facts = {name: _facts(drafter.config, plugins) for name, drafter in self._drafters.items()}
        chosen = {name: drafter.config for name, drafter in self._drafters.items()}
        lengths = create_lengths(chosen, facts, plugins, section.disable_by_batch_size)
        waiting = {
            name: WaitingStates(layout.block_size)
            for name, one in facts.items()
            if not one.stateless and not one.reads_late
        }
        num_blocks = len(storage.tensors[0])
        late = {
            tensors.owner: LateReading(batch, tensors.group_id, layout.block_size, num_blocks)
            for tensors in layout.extra_tensors
            if tensors.owner in facts and facts[tensors.owner].reads_late
        }
        drafting = Drafting(
            self._drafters,
            facts,
            lengths,
            waiting,
            late,
            TopTokenRecords({name: one.num_top_tokens for name, one in self._drafters.items() if one.num_top_tokens}),
            self._config.model.max_model_len,
            self._config.limits.max_num_batched_tokens,
            context.device,
            strict=self._config.is_strict,
        )
        rules = create_rules(section, plugins, context.operators)
        return Speculation(drafting, rules, self._model, context, layers, batch, self.max_query_len - 1, self._answers)

    def _verification(self, rule: AcceptanceRule, drafts: DraftRows, device: torch.device) -> JudgedRows:
        vocab_size = self._config.model.vocab_size
        requests = []
        for seq_id, count in enumerate(drafts.counts):
            probs = torch.full((count, vocab_size), 1 / vocab_size, device=device)
            draft = Draft([0] * count, probs=probs if drafts.has_probs else None)
            requests.append(DraftedRequest(seq_id, 1, draft))

        def judge(logits: torch.Tensor, sampler: Sampler) -> None:
            Verifier(Rules(rule), sampler).verify(logits, requests)

        return JudgedRows(drafts.num_rows, len(requests), judge)


def _facts(chosen: ResolvedDrafter, plugins: LoadedPlugins) -> DrafterFacts:
    length, _ = plugins.get(chosen.length)
    reads_states = chosen.abilities.needs_hidden_states or bool(chosen.hidden_layers)
    return DrafterFacts(
        num_tokens=chosen.num_tokens,
        stateless=chosen.abilities.stateless,
        keeps_layers=chosen.kv_cache,
        trees=chosen.trees,
        # A length that does not adapt wants drafts from the first token on: putting off saves it nothing. Of stages,
        # each may lack other positions.
        reads_late=chosen.attention is not None
        and not chosen.stages
        and not reads_states
        and issubclass(length, AdaptiveDraftLength),
    )


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


def largest_drafts(speculation: ResolvedSpeculation, limits: SchedulerLimits) -> list[DraftRows]:
    """The longest drafts of the drafters that give distributions, and of those that do not."""
    longest: dict[bool, int] = {}
    for drafter in speculation.drafters.values():
        draws = drafter.abilities.probabilities
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
