"""Prompts in bodies, where one field has one or several: texts, or lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.route import APIError

Prompts = str | list[str | int | list[int]]
"""Type of such a field. A list of integers is one prompt."""


def separate_prompts(given: Prompts, field: str) -> Sequence[str | list[int]]:
    """One or several, in order. Raises `APIError` 400 that names `field`, for an empty list and for a mixture."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise APIError(400, f"{field} is empty: give text or token ids", param=field)
    ids = [item for item in given if isinstance(item, int)]
    if not ids:
        return [item for item in given if not isinstance(item, int)]
    if len(ids) < len(given):
        index = next(index for index, item in enumerate(given) if not isinstance(item, int))
        message = f"{field} is a text, a list of token ids, or a list of such; this one mixes token ids with others"
        raise APIError(400, message, param=f"{field}.{index}")
    return [ids]
