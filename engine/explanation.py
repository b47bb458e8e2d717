"""What `dovetail explain` says, as data: each value with its origin, each choice with its candidates, memory estimates,
and what would be refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import Decision, ResolvedConfig
from dovetail.config.tree import dotted
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.plugin import Environment
from dovetail.contracts.speculation import AcceptanceRule
from dovetail.engine.rehearsal import rehearse
from dovetail.engine.resolving import create_resolution, run_rules
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.router import choose_router
from dovetail.registry.components import create_class
from dovetail.registry.registry import Registry
from dovetail.worker.estimate import MemoryEstimate, estimate_memory
from dovetail.worker.rank_estimate import RankEstimate, estimate_ranks


@dataclass(frozen=True)
class Value:
    """One value of the tree."""

    key: str
    value: Any
    origin: str
    overrides: tuple[tuple[str, Any], ...] = ()
    """(origin, value) of what it replaced, the newest first."""


@dataclass(frozen=True)
class Explanation:
    """All that is known of a configuration without reading weights."""

    values: tuple[Value, ...]
    """Resolved values; where the configuration is refused, those up to the refusal."""
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    resolved: ResolvedConfig | None
    estimate: MemoryEstimate | None
    refusal: DovetailError | None
    """Why an engine would not start."""
    refused_requests: tuple[str, ...]
    """What requests would be refused for."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Warnings of single values, by key."""
    ranks: tuple[RankEstimate, ...] = ()
    """In rank order; empty where the config is refused."""

    @property
    def largest_step(self) -> tuple[int, int] | None:
        """Most tokens that a step computes, and most requests that get tokens in it; None where the config is
        refused."""
        if self.resolved is None:
            return None
        limits = self.resolved.limits
        return limits.max_num_batched_tokens, min(limits.max_num_seqs, limits.max_num_batched_tokens)


def explain(
    layered: LayeredConfig, registry: Registry | None = None, environment: Environment | None = None
) -> Explanation:
    """Resolves a configuration and says what came of it. Raises nothing for one that is refused."""
    state = create_resolution(layered, registry, environment)
    resolved: ResolvedConfig | None = None
    estimate: MemoryEstimate | None = None
    ranks: tuple[RankEstimate, ...] = ()
    refusal: DovetailError | None = None
    try:
        resolved = run_rules(state)
        choose_router(state)
        estimate = estimate_memory(resolved, state.environment)
        ranks = estimate_ranks(resolved, estimate)
        resolved = dataclasses.replace(resolved, warnings=(*resolved.warnings, *rehearse(resolved, state.environment)))
    except DovetailError as error:
        refusal = error
    return Explanation(
        values=_values(state),
        decisions=state.decisions,
        warnings=resolved.warnings if resolved is not None else state.all_warnings(),
        resolved=resolved,
        estimate=estimate,
        refusal=refusal,
        refused_requests=_refused_requests(resolved, estimate) if resolved is not None else (),
        remarks=dict(state.remarks),
        ranks=ranks,
    )


def _values(state: Resolution) -> tuple[Value, ...]:
    over = {dotted(path): origin.over for path, origin in state.layered.origins.items()}
    return tuple(
        Value(key, value, state.layered.origin(key), over.get(key, ())) for key, value in state.flat_values().items()
    )


def _refused_requests(resolved: ResolvedConfig, estimate: MemoryEstimate | None) -> tuple[str, ...]:
    model = resolved.model
    refused = [f"prompt and output of more than {model.max_model_len} tokens together"]
    if estimate is not None and estimate.kv_tokens is not None and estimate.kv_tokens < model.max_model_len:
        refused.append(f"about {estimate.kv_tokens} tokens and more: the KV memory does not hold them")
    if model.max_logprobs >= 0:
        refused.append(f"more than {model.max_logprobs} logprobs (model.max_logprobs)")
    refused.append(f"n, best_of and beam widths above {model.max_completions} (model.max_completions)")
    if model.tokenizer_mode == "none":
        refused.append("text prompts, stop strings and detokenize=True (model.tokenizer_mode is none)")
    if media := sorted(key for key in model.hf_config if key in ("vision_config", "audio_config")):
        refused.append(f"images and sound: of a model with {' and '.join(media)} the text model alone is served")
    if resolved.speculation is None:
        refused.append("a drafter by name (no section speculative)")
    else:
        refused += _refused_by_speculation(resolved)
    if resolved.grammar is None:
        refused.append("structured outputs (grammar is null)")
    if not resolved.logits_processors:
        refused.append("processors by name (logits_processors is empty)")
    return tuple(refused)


def _refused_by_speculation(resolved: ResolvedConfig) -> Sequence[str]:
    if resolved.speculation is None:
        return []
    rule, _ = create_class(resolved.speculation.acceptance)
    refused = []
    if issubclass(rule, AcceptanceRule) and not rule.capabilities.sampling:
        refused.append(f"temperature above 0 with a drafter ({resolved.speculation.acceptance.name})")
    if not resolved.speculation.rules:
        refused.append("acceptance rules by name (speculative.rules is empty)")
    if resolved.speculation.disable_logprobs:
        refused.append("logprobs, and best_of above n, with a drafter (speculative.disable_logprobs)")
    return refused


def _rank_data(explanation: Explanation, rank: RankEstimate) -> dict[str, Any]:
    step = explanation.largest_step
    messages = [
        dataclasses.asdict(one) | {"bytes_of_largest_step": one.num_bytes(*step)} for one in rank.messages if step
    ]
    return dataclasses.asdict(rank) | {"messages": messages}


def as_data(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain data, for JSON."""
    resolved = explanation.resolved
    return {
        "values": {
            value.key: {
                "value": value.value,
                "origin": value.origin,
                "overrides": [{"origin": origin, "value": old} for origin, old in value.overrides],
            }
            for value in explanation.values
        },
        "decisions": [
            {
                "key": decision.key,
                "asked": decision.asked,
                "got": decision.got,
                "reason": decision.reason,
                "candidates": {name: list(reasons) for name, reasons in decision.candidates},
            }
            for decision in explanation.decisions
        ],
        "components": [dataclasses.asdict(component) for component in resolved.components()] if resolved else [],
        "plugin_hash": resolved.plugin_hash if resolved else None,
        "memory": dataclasses.asdict(explanation.estimate) if explanation.estimate else None,
        "ranks": [_rank_data(explanation, rank) for rank in explanation.ranks],
        "warnings": list(explanation.warnings),
        "refused": str(explanation.refusal) if explanation.refusal else None,
        "refused_requests": list(explanation.refused_requests),
    }
