"""What was done for a request that runs, or has ended, and why. Counts and times: no text, no token ids."""

from __future__ import annotations

import time
from typing import Any

from dovetail.contracts.engine_client import EngineFacts, RequestReport
from dovetail.contracts.telemetry import GrammarStats, RequestStats
from dovetail.plugins.routes.explain.choices import chosen_adapter, why_drafter


def report_as_data(report: RequestReport, facts: EngineFacts) -> dict[str, Any]:
    """One request as JSON. Times are seconds, null where the request did not come so far."""
    stats = report.stats
    return {
        "request_id": stats.request_id,
        "state": report.state,
        "arrival": time.time() - (time.monotonic() - stats.arrival_time),
        "times": _times(stats),
        "prompt": {
            "tokens": stats.num_prompt_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "why": _why_cached(stats, facts),
        },
        "output": {
            "tokens": stats.num_generated_tokens,
            "completions": stats.n,
            "finish_reason": stats.finish_reason or None,
            "error_type": stats.error_type,
        },
        "preemptions": stats.num_preemptions,
        "priority": stats.priority,
        "speculation": _speculation(stats, facts),
        "experiment": _experiment(stats),
        "grammar": _grammar(stats, facts),
        "weight_version": stats.weight_version,
        "adapter": chosen_adapter(stats.adapter, facts),
    }


def _times(stats: RequestStats) -> dict[str, float | None]:
    scheduled, first, end = stats.first_scheduled_time, stats.first_token_time, stats.finish_time
    decode = None if first is None else end - first
    per_completion = stats.num_generated_tokens / stats.n
    return {
        "queue_s": (end if scheduled is None else scheduled) - stats.arrival_time,
        "prefill_s": None if scheduled is None else (end if first is None else first) - scheduled,
        "ttft_s": None if first is None else first - stats.arrival_time,
        "decode_s": decode,
        "itl_s": decode / (per_completion - 1) if decode is not None and per_completion > 1 else None,
        "total_s": end - stats.arrival_time,
    }


def _why_cached(stats: RequestStats, facts: EngineFacts) -> str:
    if stats.first_scheduled_time is None:
        return "no step has computed any of it"
    if stats.has_prompt_logprobs:
        return "log probabilities of the prompt need all of it computed"
    if not facts.prefix_caching:
        return "cache.prefix_caching is off"
    block, cached = facts.block_size, stats.num_cached_tokens
    most = (stats.num_prompt_tokens - 1) // block * block
    if most == 0:
        return f"the prompt fills no block of {block} tokens in front of its last token, which is always computed"
    if cached >= most:
        return f"all whole blocks of {block} tokens in front of the last token, which is always computed"
    others = "another request with the same cache_salt" if stats.is_salted else "another request without a cache_salt"
    if cached == 0:
        return f"the first {block} tokens match none that {others} left in the cache"
    return f"the tokens behind match none that {others} left in the cache, or it was evicted"


def _speculation(stats: RequestStats, facts: EngineFacts) -> dict[str, Any]:
    rounds, drafted, accepted = stats.num_draft_rounds, stats.num_drafted, stats.num_accepted
    return {
        "drafter": stats.drafter,
        "why": _why_drafts(stats, facts),
        "steps_with_drafts": rounds,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "drafted_per_position": stats.drafted_per_position,
        "accepted_per_position": stats.accepted_per_position,
    }


def _experiment(stats: RequestStats) -> dict[str, str] | None:
    part = stats.assignment
    return None if part is None else {"name": part.experiment, "arm": part.arm}


def _why_drafts(stats: RequestStats, facts: EngineFacts) -> str:
    chosen = why_drafter(stats.speculation, facts)
    if stats.assignment is not None:
        chosen = f"arm {stats.assignment.arm!r} of experiment {stats.assignment.experiment!r}"
    if stats.drafter is None:
        return chosen
    if stats.drafter_is_idle:
        return f"{chosen}; its drafts have not paid for long, so this request went without"
    if stats.drafter_error is not None:
        kind = stats.drafter_error.partition(":")[0]
        return f"{chosen}; it raised {kind}, and the request went on without it: the engine's log has the error"
    if stats.num_draft_rounds == 0 and stats.num_generated_tokens > stats.n:
        return f"{chosen}; no draft of it was verified: it found nothing to guess, or its draft length asked for none"
    return chosen


def _grammar(stats: RequestStats, facts: EngineFacts) -> dict[str, Any]:
    found = stats.grammar
    if found is None:
        why = "the request asked for no form of its output"
        return {"backend": None, "form": None, "was_compiled": None, "wait_s": None, "why": why}
    return {
        "backend": facts.grammar.name,
        "form": found.form,
        "was_compiled": found.was_compiled,
        "wait_s": found.wait,
        "why": _why_waited(found, is_over=bool(stats.finish_reason)),
    }


def _why_waited(grammar: GrammarStats, *, is_over: bool) -> str:
    if grammar.is_refused:
        return "it cannot be compiled, which ended the request: the response says why"
    if grammar.was_compiled:
        return "an earlier request had it compiled"
    if grammar.wait is not None:
        return "the request waited until it was compiled"
    return "the request ended before it was compiled" if is_over else "it is being compiled"
