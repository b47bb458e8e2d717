"""Tries features of engines (cached prefixes, chunked prompts, preemption) in each arm, as request features are tried.
Features that were not tried or are not served are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail import LLMEngine
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.features import first_variants, repeating_prompt
from dovetail.spec_decode.experiments.run import Bench, TokenIds, Workload
from dovetail.spec_decode.experiments.schema import BASELINE
from dovetail.spec_decode.experiments.trials import MAX_TOKENS, Asked, Trial, ask, judge

NOT_SERVED: Mapping[str, str] = {
    "structured output": "grammars are not served yet",
    "LoRA": "arms name no adapters yet; an adapter that is merged into the weights is a model like any other",
    "pipeline parallel": "layers are not split over ranks yet",
}
_LONGEST_PROMPT = 4096
"""Tokens of a prompt that is long enough to be cut, at most: it is computed once per arm."""
_BEYOND = 16
"""Tokens by which such a prompt exceeds a step."""
_MOST_REQUESTS = 32
_LONGEST_OF_CROWD = 192
"""Requests that are to fill the KV memory at most, and tokens of their prompts."""


_Predictions = Sequence[Sequence[int]]
"""What the baseline answered, which drafters that read predictions are told."""


@dataclass(frozen=True)
class _Case:
    """One feature of an engine."""

    obstacle: Callable[[LLMEngine], str | None]
    """Why the feature cannot be tried in an arm; None: it can."""
    run: Callable[[Bench, Variant, Workload, _Predictions], tuple[Asked, str | None]]
    """What came, and why nothing was seen of it; None: the engine did it."""


def try_engine_features(bench: Bench, workload: Workload) -> list[Trial]:
    """Each of them in each arm, at its first draft length. What an engine does beneath them changes no token, so an arm
    is held to what the baseline brought under the same."""
    variants = first_variants(bench)
    trials = [trial for name, case in _CASES.items() for trial in _try_case(name, case, bench, workload, variants)]
    for variant in variants:
        ranks = bench.engine_of(variant).config.tensor_parallel
        found = Trial(variant.arm, "tensor parallel", "ran", f"all of this table, over {ranks} ranks")
        if ranks == 1:
            why = (
                "executor.tensor_parallel is 1: with more in the experiment's config, all of this table runs over ranks"
            )
            found = replace(found, outcome="not tried", reason=why)
        trials.append(found)
    trials += [Trial(v.arm, name, "not served", why) for name, why in NOT_SERVED.items() for v in variants]
    return trials


def _try_case(name: str, case: _Case, bench: Bench, workload: Workload, variants: Sequence[Variant]) -> Iterator[Trial]:
    expected = Asked("refused")
    for variant in variants:
        why_not = case.obstacle(bench.engine_of(variant))
        if why_not is not None:
            yield Trial(variant.arm, name, "not tried", why_not)
            continue
        asked, idle = case.run(bench, variant, workload, [answer.tokens for answer in expected.answers])
        if variant.arm == BASELINE:
            expected = asked
        yield judge(variant, name, asked, expected, is_promised=True, idle=idle, tolerance=0.0)


def _room(engine: LLMEngine) -> int:
    return engine.config.model.max_model_len - MAX_TOKENS - 1


def _uncached(engine: LLMEngine) -> str | None:
    return None if engine.config.cache.prefix_caching else "cache.prefix_caching is off"


def _repeat(bench: Bench, variant: Variant, workload: Workload, told: _Predictions) -> tuple[Asked, str | None]:
    prompt = repeating_prompt(workload.token_ids[0], _room(bench.engine_of(variant)))
    ask(bench, variant, [prompt], {})
    asked = ask(bench, variant, [prompt], {}, predictions=told, keeps_cache=True)
    return asked, None if asked.cached_tokens else "no token of the repeated prompt came from the cache"


def _uncut(engine: LLMEngine) -> str | None:
    limits = engine.config.limits
    if not limits.enable_chunked_prefill:
        return "scheduler.enable_chunked_prefill is off"
    needed = limits.max_num_batched_tokens + _BEYOND
    if needed > _room(engine):
        return f"scheduler.max_num_batched_tokens ({needed - _BEYOND:,}) takes in the longest prompt whole"
    if needed > _LONGEST_PROMPT:
        return (
            f"a prompt of {needed:,} tokens would be needed; a lower scheduler.max_num_batched_tokens cuts shorter ones"
        )
    return None


def _long_prompt(bench: Bench, variant: Variant, workload: Workload, told: _Predictions) -> tuple[Asked, str | None]:
    engine = bench.engine_of(variant)
    length = engine.config.limits.max_num_batched_tokens + _BEYOND
    prompt = repeating_prompt(workload.token_ids[0], _room(engine), length)
    asked = ask(bench, variant, [prompt], {}, predictions=told)
    parts = sum(step.num_prompt_tokens > 0 for step in bench.take_steps(variant))
    return asked, None if parts > 1 else "the prompt was computed in one step"


def _crowd_size(engine: LLMEngine) -> tuple[int, int]:
    """Requests whose prompts together take nearly all KV blocks, so that none is left to grow into; and the tokens of
    each prompt."""
    blocks = engine.cache_statistics().num_blocks
    count = min(_MOST_REQUESTS, engine.config.limits.max_num_seqs, blocks)
    return count, blocks // count * engine.config.cache.block_size


def _roomy(engine: LLMEngine) -> str | None:
    count, tokens = _crowd_size(engine)
    if tokens <= min(_LONGEST_OF_CROWD, _room(engine)):
        return None
    needed = f"{count} prompts of {tokens:,} tokens would be needed to fill the KV memory"
    return f"{needed}; a lower cache.num_blocks takes less"


def _crowd(bench: Bench, variant: Variant, workload: Workload, told: _Predictions) -> tuple[Asked, str | None]:
    count, tokens = _crowd_size(bench.engine_of(variant))
    prompts = [_own_prompt(workload, index, tokens) for index in range(count)]
    asked = ask(bench, variant, prompts, {}, predictions=told)
    return asked, None if asked.preemptions else "no request was preempted"


def _own_prompt(workload: Workload, index: int, tokens: int) -> TokenIds:
    """A prompt that shares no block with the others: each begins elsewhere."""
    turn, place = divmod(index, len(workload.token_ids))
    prompt = repeating_prompt(workload.token_ids[place], tokens)
    return prompt[turn:] + prompt[:turn]


_CASES: Mapping[str, _Case] = {
    "prefix cache": _Case(_uncached, _repeat),
    "chunked prefill": _Case(_uncut, _long_prompt),
    "preemption": _Case(_roomy, _crowd),
}
