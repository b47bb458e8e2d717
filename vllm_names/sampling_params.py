"""`SamplingParams` as vLLM's programs use them: made by position or by name, changed afterwards."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from enum import IntEnum, StrEnum
from numbers import Real
from typing import Any

from dovetail.contracts import sampling
from dovetail.contracts.sampling import BeamSearchParams as NamedBeamSearchParams
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.vllm.missing import BEAM_SEARCH, PROCESSORS, answering, refuse
from dovetail.vllm.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
from dovetail.vllm.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_NOT_SERVED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "logits_processors": (PROCESSORS, ([],)),
    "spaces_between_special_tokens": ("tokenizers insert no such spaces any more", (True,)),
    "use_beam_search": (BEAM_SEARCH, (False,)),
    "early_stopping": (BEAM_SEARCH, (False,)),
    "length_penalty": (BEAM_SEARCH, (1.0,)),
    "skip_clone": ("parameters are copied when a request is added, so that nothing can change under it", (True, False)),
}
"""vLLM's fields that are not served: the reason, and the values that ask for what happens anyway. None always does."""

_NONE_IS_DEFAULT = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p")
_LISTS = ("stop", "stop_token_ids", "bad_words")


class SamplingType(IntEnum):
    """How a request's tokens are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(StrEnum):
    """What each output carries; the values are those of `SamplingParams.output_kind`."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class SamplingParams(sampling.SamplingParams):
    """Dovetail's `SamplingParams` that may be changed until a request is added, which keeps a checked copy.

    Values are checked when the object is made and when a request is added; a name that does not exist is refused at
    once. `extra_args` is `extra`, `guided_decoding` is `structured_outputs`.
    """

    def __init__(self, n: int = 1, best_of: int | None = None, **given: Any):
        """Raises `RequestError` for a value, or a field of vLLM's, that cannot be served, and TypeError for a name that
        does not exist."""
        super().__init__(n=n, best_of=best_of, **_translated(given))
        for name in _LISTS:
            vars(self)[name] = list(vars(self)[name])

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        for known, translated in _translated({name: value}).items():
            if known not in self.__dataclass_fields__:
                raise AttributeError(f"SamplingParams: {sampling.unknown_field(type(self), known)}")
            vars(self)[known] = translated

    @property
    def extra_args(self) -> Mapping[str, Any]:
        """vLLM's name of `extra`."""
        return self.extra

    @property
    def guided_decoding(self) -> StructuredOutputs | None:
        """vLLM's older name of `structured_outputs`."""
        return self.structured_outputs

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def snapshot(self) -> sampling.SamplingParams:
        """The checked copy that a request keeps. Raises `RequestError`."""
        return sampling.SamplingParams(**{item.name: vars(self)[item.name] for item in fields(self)})

    def clone(self) -> SamplingParams:
        """A copy that can be changed by itself."""
        return copy.deepcopy(self)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Takes None for every field's default, and token ids of `logit_bias` as text."""
        bias = given.get("logit_bias")
        if bias is not None:
            given["logit_bias"] = _bounded(bias)
        optional = ("n", *_NONE_IS_DEFAULT)
        return cls(**{name: value for name, value in given.items() if value is not None or name not in optional})


class BeamSearchParams(NamedBeamSearchParams):
    """Dovetail's `BeamSearchParams`, which may be given by position."""

    def __init__(self, beam_width: int, max_tokens: int, ignore_eos: bool = False, **given: Any):
        super().__init__(beam_width=beam_width, max_tokens=max_tokens, ignore_eos=ignore_eos, **given)


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's fields under Dovetail's names; those that say nothing are left out."""
    taken: dict[str, Any] = {}
    for name, value in given.items():
        if name in _NOT_SERVED:
            reason, no_effect = _NOT_SERVED[name]
            if value is not None and value not in no_effect:
                refuse(f"SamplingParams({name}={value!r})", reason)
        elif name == "guided_decoding":
            if value is not None:
                taken["structured_outputs"] = value
        elif name == "extra_args":
            taken["extra"] = value or {}
        elif name in ("logprobs", "prompt_logprobs") and isinstance(value, bool):
            taken[name] = 1 if value else None
        elif name == "seed" and value == -1:
            taken[name] = None
        elif name in _LISTS and value is None:
            taken[name] = []
        else:
            taken[name] = value
    return taken


def _bounded(bias: Any) -> Any:
    """Token ids as numbers and values within bounds. What is neither is refused where all values are checked."""
    if not isinstance(bias, Mapping):
        return bias
    return {
        int(token) if isinstance(token, str) and token.isdecimal() else token: min(max(value, -100.0), 100.0)
        if isinstance(value, Real)
        else value
        for token, value in bias.items()
    }


def as_mutable(params: sampling.SamplingParams) -> SamplingParams:
    """The same parameters, to be changed."""
    return SamplingParams(**{item.name: vars(params)[item.name] for item in fields(params)})


__getattr__ = answering(__name__)
