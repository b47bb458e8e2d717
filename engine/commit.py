"""Tokens of one step come to their sequences, and computed blocks to the KV memory."""

from __future__ import annotations

from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.sequence import Sequence
from dovetail.engine.step import Ending, Step


def commit_tokens(step: Step, kv: KVCacheManager) -> None:
    """Appends what `step.result` holds, and notes in `step.endings` which sequences end."""
    result = step.result
    if result.counts is None and step.plan.num_drafts is None and not result.failed:
        _commit_decodes(step, kv)
    else:
        _commit_rows(step, kv)


def _commit_decodes(step: Step, kv: KVCacheManager) -> None:
    """The common case: every request of the batch got one token."""
    commit, endings, schedule = kv.commit, step.endings, step.schedule
    for sequence, num_tokens, token in zip(schedule.requests, schedule.num_tokens, step.result.token_ids, strict=True):
        computed = sequence.num_computed_tokens + num_tokens
        sequence.num_computed_tokens = computed
        sequence.token_ids.append(token)
        total = sequence.num_tokens + 1
        sequence.num_tokens = total
        if computed >= sequence.commit_at:
            commit(sequence)
        if total >= sequence.max_total_tokens or token in sequence.stop_ids:
            endings.append((sequence, _ending(sequence, token)))


def _commit_rows(step: Step, kv: KVCacheManager) -> None:
    """Steps with incomplete prompts, drafts or failed requests."""
    schedule, result, drafts = step.schedule, step.result, step.plan.num_drafts
    tokens = iter(result.token_ids)
    counts = result.counts if result.counts is not None else [1] * len(schedule.requests)
    for index, sequence in enumerate(schedule.requests):
        if index in result.failed:
            step.endings.append((sequence, Ending("error", error=result.failed[index])))
            continue
        new_tokens = [next(tokens) for _ in range(counts[index])]
        num_drafts = drafts[index] if drafts is not None else 0
        # Rejected drafts were computed for nothing: of d drafts, len(new_tokens) - 1 stand.
        # A sequence that was released meanwhile has computed nothing, whatever stands.
        has_stayed = num_drafts and (sequence.block_ids or sequence.host_block_ids)
        rejected = num_drafts - (len(new_tokens) - 1) if has_stayed else 0
        sequence.num_computed_tokens += schedule.num_tokens[index] - rejected
        sequence.num_draft_tokens = 0
        start = sequence.num_output_tokens
        ending = _append(sequence, new_tokens)
        if num_drafts and len(new_tokens) > 1:
            _note_accepted(step, sequence, start, len(new_tokens) - 1)
        kv.commit(sequence)
        if num_drafts:
            kv.trim(sequence)
        if index in result.pooled:
            ending = Ending("stop", pooled=result.pooled[index])
        if ending is not None:
            step.endings.append((sequence, ending))


def _append(sequence: Sequence, tokens: list[int]) -> Ending | None:
    """Appends tokens up to the first that ends the sequence; those after it are dropped."""
    for token in tokens:
        sequence.token_ids.append(token)
        sequence.num_tokens += 1
        if sequence.num_tokens >= sequence.max_total_tokens or token in sequence.stop_ids:
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
            return _ending(sequence, token)
    return None


def _note_accepted(step: Step, sequence: Sequence, start: int, num_accepted: int) -> None:
    """The first `num_accepted` of the tokens that were appended at `start` are drafts; some may have been dropped."""
    if step.accepted_spans is None:
        step.accepted_spans = {}
    step.accepted_spans[sequence.seq_id] = start, min(num_accepted, sequence.num_output_tokens - start)


def _ending(sequence: Sequence, token: int) -> Ending:
    if token in sequence.stop_ids:
        return Ending("stop", None if token in sequence.eos_token_ids else token)
    return Ending("length")
