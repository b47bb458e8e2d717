"""Texts that are cut to a number of tokens, with the special tokens around them whole: as tokenizers of Hugging Face
cut with `truncation=True`, from the right, and of two texts the longer one first."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.errors import RequestError
from dovetail.engine.tokenization.tokenizer import Tokenizer


def encode_start(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Token ids of a text, of which the end is left out where there are more than `most` with special tokens.

    With `most` 5, and [CLS] and [SEP] around texts: [CLS] a b c d e [SEP] -> [CLS] a b c [SEP].

    Raises `RequestError` for text that is no Unicode, and where `most` has no budget for a token of the text."""
    whole = tokenizer.encode(text)
    if len(whole) <= most:
        return whole
    inner = tokenizer.encode(text, add_special_tokens=False)
    start = _find(inner, whole, 0)
    kept = _budget(most, len(whole) - len(inner), 1)
    return _without(whole, start + kept, start + len(inner))


def encode_pair_start(tokenizer: Tokenizer, first: str, second: str, most: int) -> tuple[list[int], list[int]]:
    """As `Tokenizer.encode_pair`; ends of the texts are left out where there are more than `most` tokens. A text that
    is shorter than half of the budget stays whole, and the other one has the rest.

    Raises as `encode_start` does."""
    ids, types = tokenizer.encode_pair(first, second)
    if len(ids) <= most:
        return ids, types
    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
    of_a = _find(a, ids, 0)
    of_b = _find(b, ids, of_a + len(a))
    kept_a, kept_b = shares(len(a), len(b), _budget(most, len(ids) - len(a) - len(b), 2))
    cut = [_without(_without(row, of_b + kept_b, of_b + len(b)), of_a + kept_a, of_a + len(a)) for row in (ids, types)]
    return cut[0], cut[1]


def shares(first: int, second: int, budget: int) -> tuple[int, int]:
    """How many tokens two texts keep of `first` and `second` that they have, where `budget` is less than both."""
    shorter = min(first, second, budget // 2)
    return (shorter, budget - shorter) if first <= second else (budget - shorter, shorter)


def _budget(most: int, num_added: int, fewest: int) -> int:
    if most - num_added < fewest:
        message = f"{most} leaves no tokens for the text, around which the tokenizer puts {num_added}"
        raise RequestError(f"truncate_prompt_tokens {message}: give {num_added + fewest} or more")
    return most - num_added


def _find(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Where the text's own tokens begin."""
    count = len(part)
    for index in range(start, len(whole) - count + 1):
        if whole[index : index + count] == part:
            return index
    raise RequestError(
        "truncate_prompt_tokens: the tokenizer's special tokens cannot be told from those of the text; shorten the"
        " text, or give token ids"
    )


def _without(row: Sequence[int], start: int, stop: int) -> list[int]:
    return [*row[:start], *row[stop:]]
