"""Scores of pairs of texts, from embeddings or from a cross-encoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from dovetail.contracts.errors import RequestError
from dovetail.contracts.prompts import Prompt, TokensPrompt
from dovetail.contracts.sampling import as_token_ids
from dovetail.engine.pooling.outputs import (
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    shared_fields,
)
from dovetail.engine.tokenization.cutting import encode_pair_start, shares
from dovetail.engine.tokenization.tokenizer import Tokenizer

One = TypeVar("One")


def check_not_empty(prompt: object, name: str = "the prompt") -> None:
    """Raises `RequestError` for a prompt to pool that is an empty text, or has no token ids: special tokens alone would
    be the embedding of nothing. `name`: what the message calls it."""
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    if isinstance(prompt, str | list | tuple) and not prompt:
        raise RequestError(f"{name} is empty: give text or token ids")


def for_each(first: Sequence[One], second: Sequence[object]) -> list[One]:
    """One of the first side for each of the second, which a single one goes with. Raises `RequestError` where a side
    has none, and unless it is one with many, or as many with as many."""
    if not first or not second:
        raise RequestError("score compares texts, and one side has none: give at least one on each")
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"score compares one text with many, or as many with as many, got {len(first)} and {len(second)}"
        )
    return list(first) * (len(second) if len(first) == 1 else 1)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of two embeddings of equal size, -1 to 1; 0 where one is all zeros."""
    lengths = math.hypot(*first) * math.hypot(*second)
    if not lengths:
        return 0.0
    # Rounding may put the quotient of two equal embeddings a bit above 1.
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(first, second, strict=True)) / lengths))


def pair_prompt(
    tokenizer: Tokenizer | None, first: Prompt, second: Prompt, *, has_types: bool, most: int | None = None
) -> Prompt:
    """Two texts, or two lists of token ids, as one prompt. `has_types`: whether the model's tokens have types. `most`:
    how many tokens it has at most; see `encode_pair_start`. Raises `RequestError` for one of each, and for an empty
    one."""
    for prompt in (first, second):
        check_not_empty(prompt, "a text of the pair")
    texts, ids = [_text_of(one) for one in (first, second)], [_ids_of(one) for one in (first, second)]
    if texts[0] is not None and texts[1] is not None:
        if tokenizer is None:
            raise RequestError("this engine has no tokenizer (tokenizer_mode none): give token ids")
        if most is None:
            token_ids, types = tokenizer.encode_pair(texts[0], texts[1])
        else:
            token_ids, types = encode_pair_start(tokenizer, texts[0], texts[1], most)
        pair: TokensPrompt = {"prompt": f"{texts[0]}\n{texts[1]}", "prompt_token_ids": token_ids}
        return {**pair, "token_type_ids": types} if has_types else pair
    if ids[0] is not None and ids[1] is not None:
        counts = len(ids[0]), len(ids[1])
        if most is not None and sum(counts) > most:
            counts = shares(*counts, most)
        return {"prompt_token_ids": [*ids[0][: counts[0]], *ids[1][: counts[1]]]}
    raise RequestError("score takes two texts, or two lists of token ids, not one of each")


def _text_of(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
        return text if isinstance(text, str) else None
    return prompt if isinstance(prompt, str) else None


def _ids_of(prompt: Prompt) -> tuple[int, ...] | None:
    given: object = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    return None if given is None or isinstance(given, str) else as_token_ids("prompt_token_ids", given)


def cosines(
    first: Sequence[PoolingRequestOutput], second: Sequence[PoolingRequestOutput]
) -> list[ScoringRequestOutput]:
    """Of embeddings of both sides: the cosine of each pair."""
    return [_cosine(*pair) for pair in zip(for_each(first, second), second, strict=True)]


def pair_scores(outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
    """Of a cross-encoder's outputs: its one score for each pair."""
    return [_scored(output, output.outputs.pooled.floats()[0], output.prompt_token_ids) for output in outputs]


def _cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> ScoringRequestOutput:
    score = cosine(first.outputs.pooled.floats(), second.outputs.pooled.floats())
    return _scored(second, score, [*first.prompt_token_ids, *second.prompt_token_ids])


def _scored(base: PoolingRequestOutput, score: float, token_ids: list[int]) -> ScoringRequestOutput:
    shared = shared_fields(base)
    shared["prompt_token_ids"] = token_ids
    return ScoringRequestOutput(**shared, outputs=ScoringOutput(score=score))
