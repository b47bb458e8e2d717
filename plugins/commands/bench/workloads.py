"""Workloads: which prompts, how many tokens out. The named ones are those that comparisons with other engines quote.

Prompts are pieces of real text, tokenized: random ids have statistics that no text has, and flatter or punish
speculation, expert routing and prefix caches. Every request starts at its own place of the text, so that none shares
a prefix with another unless the workload says so.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dovetail.commands.arrivals import BLOCK_TOKENS, TracedRequest
from dovetail.commands.checks import nearest, require

_OWN_TOKENS = 8
"""Tokens at the begin of a trace's block that are drawn for it."""


@dataclass(frozen=True)
class Workload:
    """Requests of one size, that arrive together. Greedy, end of sequence ignored."""

    name: str
    num_requests: int
    prompt_tokens: int
    """Of each request, the shared prefix included."""
    output_tokens: int
    shared_prefix_tokens: int = 0
    """The same in all requests. The prefix cache is emptied before each repetition, so it is shared within one only."""


NAMED: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("decode-1", num_requests=1, prompt_tokens=32, output_tokens=128),
        Workload("prefill-1024", num_requests=1, prompt_tokens=1024, output_tokens=1),
        Workload("batch-32", num_requests=32, prompt_tokens=128, output_tokens=128),
        Workload("shared-prefix-64", num_requests=64, prompt_tokens=528, output_tokens=64, shared_prefix_tokens=512),
    )
}


@dataclass(frozen=True)
class Load:
    """What is sent to an engine."""

    name: str
    prompts: Sequence[Sequence[int]]
    """Token ids."""
    output_tokens: Sequence[int]
    """Per request."""
    arrivals: Sequence[float] | None = None
    """Seconds from the start, where the load itself says when its requests come."""

    def describe(self, **more: Any) -> dict[str, Any]:
        """What has to be equal for two results to be of the same workload."""
        digest = hashlib.sha256(repr([list(prompt) for prompt in self.prompts]).encode()).hexdigest()[:16]
        return {
            "requests": len(self.prompts),
            "prompt_tokens": _range([len(prompt) for prompt in self.prompts]),
            "output_tokens": _range(self.output_tokens),
            "token_ids_sha256": digest,
            **more,
        }


def find_workload(name: str) -> Workload:
    """A named workload. Raises `ConfigError` with the nearest names."""
    require(name in NAMED, f"there is no workload {name!r}: {nearest(name, NAMED)}")
    return NAMED[name]


def create_load(workload: Workload, corpus: Sequence[int], seed: int = 0) -> Load:
    """The requests of a workload, cut from a tokenized text; the same for the same seed."""
    own = workload.prompt_tokens - workload.shared_prefix_tokens
    lengths = [workload.shared_prefix_tokens, *[own] * workload.num_requests]
    prefix, *rest = cut_prompts(lengths, corpus, seed)
    return Load(workload.name, [prefix + tokens for tokens in rest], [workload.output_tokens] * workload.num_requests)


def describe_load(workload: Workload, load: Load, seed: int) -> dict[str, Any]:
    """As `Load.describe`, with what the workload says."""
    return load.describe(shared_prefix_tokens=asdict(workload)["shared_prefix_tokens"], seed=seed)


def cut_prompts(lengths: Sequence[int], corpus: Sequence[int], seed: int) -> list[list[int]]:
    """One piece of the text per length, each from a place of its own; past its end the text starts again."""
    require(len(corpus) >= 2, "the text that prompts are cut from has fewer than two tokens: give a longer one")
    draw = random.Random(seed)
    places = draw.sample(range(len(corpus)), len(corpus))
    known = sorted(set(corpus))
    prompts = []
    for index, length in enumerate(lengths):
        place = places[index % len(places)]
        prompt = [corpus[(place + step) % len(corpus)] for step in range(length)]
        if index >= len(places) and prompt:
            # More requests than places: another first token keeps them from sharing cached blocks.
            prompt[0] = draw.choice(known)
        prompts.append(prompt)
    return prompts


def trace_prompts(requests: Sequence[TracedRequest], corpus: Sequence[int], seed: int) -> list[list[int]]:
    """The prompts of a trace: pieces of the text; blocks with one id have the same tokens."""
    prompts = cut_prompts([0 if request.blocks else request.input_tokens for request in requests], corpus, seed)
    known = sorted(set(corpus))
    return [
        _of_blocks(request, corpus, known, seed) if request.blocks else prompt
        for request, prompt in zip(requests, prompts, strict=True)
    ]


def _of_blocks(request: TracedRequest, corpus: Sequence[int], known: Sequence[int], seed: int) -> list[int]:
    tokens: list[int] = []
    for block in request.blocks:
        draw = random.Random(f"{seed}/{block}")
        # A short text has fewer places than a trace has blocks: what is drawn first keeps blocks apart.
        tokens += draw.choices(known, k=_OWN_TOKENS)
        place = draw.randrange(len(corpus))
        tokens += [corpus[(place + step) % len(corpus)] for step in range(BLOCK_TOKENS - _OWN_TOKENS)]
    return tokens[: request.input_tokens]


def _range(counts: Sequence[int]) -> int | list[int]:
    return counts[0] if min(counts) == max(counts) else [min(counts), max(counts)]
