"""`-s key=value`: fields of `SamplingParams` on the command line."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from typing import Any

import yaml

from dovetail.contracts.errors import RequestError
from dovetail.contracts.sampling import SamplingParams

_NAMES = [field.name for field in fields(SamplingParams)]


def sampling_params(
    defaults: SamplingParams, settings: list[str], max_tokens: int, temperature: float | None
) -> SamplingParams:
    """The model's defaults with what the command line says. Raises `RequestError` for an unknown field or bad value."""
    values: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        values["temperature"] = temperature
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator:
            raise RequestError(f"-s {setting!r}: write field=value, as in -s top_p=0.9")
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"-s {setting!r}: SamplingParams has no field {name!r}{hint}")
        values[name] = yaml.safe_load(text)
    return replace(defaults, **values)
