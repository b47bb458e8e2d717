"""Log probabilities in the shape of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.contracts.outputs import PositionLogprobs
from dovetail.plugins.routes.completions.logprobs import LOWEST, TokenTexts


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    num_top: int,
    token_texts: TokenTexts,
    *,
    as_ids: bool,
) -> dict[str, Any]:
    """An entry per token. `num_top`: how many alternatives were asked for. `as_ids`: tokens are shown as
    "token_id:N" in place of their text. Those of processed log probabilities have `surviving_mass`, a field of ours."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        entries = dict(zip(position, (_entry(*item, as_ids) for item in _items(position, token_texts)), strict=True))
        ranked = sorted(position, key=lambda token: position[token].rank)
        shown = ranked if num_top == -1 else ranked[:num_top]
        mass = position[token_id].surviving_mass
        processed = {} if mass is None else {"surviving_mass": mass}
        content.append({**entries[token_id], "top_logprobs": [entries[token] for token in shown], **processed})
    return {"content": content, "refusal": None}


def _items(position: PositionLogprobs, token_texts: TokenTexts) -> Iterable[tuple[int, str, float]]:
    for (token_id, found), text in zip(position.items(), token_texts(position), strict=True):
        yield token_id, text, max(found.logprob, LOWEST)


def _entry(token_id: int, text: str, logprob: float, as_ids: bool) -> dict[str, Any]:
    # The text of a part of a character does not tell its bytes.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": f"token_id:{token_id}" if as_ids else text, "logprob": logprob, "bytes": known}
