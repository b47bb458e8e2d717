"""Sampling parameters of a request, validated once, when they are made."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import FrozenInstanceError, dataclass, field
from numbers import Integral, Real
from typing import Any, NoReturn, Protocol, TypeVar, cast, runtime_checkable

from dovetail.contracts.errors import RequestError
from dovetail.contracts.structured_outputs import StructuredOutputs

T = TypeVar("T")


def unknown_field(cls: type, name: str) -> str:
    """The message for a field that a dataclass does not have, with the nearest names."""
    known = sorted(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown field {name!r}: {hint}"


def _names_fields(cls: type[T]) -> type[T]:
    """Makes a dataclass answer an unknown keyword with the nearest fields, and an assignment with what to do
    instead."""
    create: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(create)
    def create_or_explain(self: Any, *args: Any, **given: Any) -> None:
        if not cls.__dataclass_fields__.keys() >= given.keys():  # type: ignore[attr-defined]
            name = next(name for name in given if name not in cls.__dataclass_fields__)  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__}: {unknown_field(cls, name)}")
        create(self, *args, **given)

    def refuse_change(self: object, name: str, value: object) -> NoReturn:
        if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
            raise FrozenInstanceError(f"{cls.__name__}: {unknown_field(cls, name)}")
        raise FrozenInstanceError(
            f"{cls.__name__} do not change once they are made: take params = dataclasses.replace(params,"
            f" {name}={value!r}); those of dovetail.vllm do"
        )

    cls.__init__ = create_or_explain  # type: ignore[method-assign]
    cls.__setattr__ = refuse_change  # type: ignore[method-assign]
    return cls


@_names_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Field names and defaults are vLLM's. Raises `RequestError`, naming the field and its range, for a value that
    cannot be served, and TypeError for a field that does not exist.
    """

    n: int = 1
    """Completions returned per prompt; 1 at temperature 0. The config's `model.max_completions` bounds it."""
    best_of: int | None = None
    """Completions generated; the `n` with the highest log probability per token are returned, the best first."""
    temperature: float = 1.0
    """0 is greedy. Other values must be between 1e-30 and 1e30: they are used as float32, where smaller ones would
    become 0 and so greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """CTRL, section 4.1: scores of tokens seen in prompt or output are divided (if positive) or multiplied by it."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever the other requests of the batch."""
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be sampled before this many output tokens."""
    max_tokens: int | None = 16
    """None: until the model's length is reached."""
    ignore_eos: bool = False
    bad_words: str | list[str] | tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    logprobs: int | None = None
    """Number of alternatives reported per token with the sampled one, from the raw distribution (before temperature,
    penalties and masks; see `logprobs_mode`). 0: only the sampled token. -1: the whole vocabulary."""
    logprobs_mode: str | None = None
    """Whose log probabilities `logprobs` reports: "raw_logprobs" of the model, or "processed_logprobs" of the
    distribution that tokens are drawn from (after penalties, masks, temperature, min_p, top_k and top_p), with the mass
    that the truncation left (`Logprob.surviving_mass`). None: the config's `model.logprobs_mode`. `prompt_logprobs` are
    always raw: prompts are not sampled."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    kept_special_tokens: list[int] | tuple[int, ...] = ()
    """Token ids that `skip_special_tokens` does not leave out: a dialect's markers."""
    truncate_prompt_tokens: int | None = None
    """Keeps only this many tokens at the end of the prompt."""
    output_kind: str = "cumulative"
    """What each `RequestOutput` carries: "cumulative" (all so far), "delta" (what is new) or "final_only"."""
    speculation: str | None = None
    """Name of a configured drafter, "off", or None for the config's default."""
    acceptance: str | None = None
    """Name of a configured acceptance rule (`speculative.rules`), or None, or its name, for the config's
    `speculative.acceptance`."""
    prediction: str | list[int] | tuple[int, ...] | None = None
    """What much of the output is expected to be, as text or token ids: the file that an edit changes little. It makes
    the output faster and never changes it. Wants a drafter that reads predictions."""
    processors: Mapping[str, Any] = field(default_factory=dict)
    """Options for configured logits processors: name -> the processor's value."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the output: JSON by a schema, a regular expression, ... Wants a configured `grammar`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values for plugins that read requests: schedulers see them as `RequestState.extra`, hooks in
    `dovetail_request_added`. The engine does not read them. They are copied when the parameters are made."""

    def __post_init__(self) -> None:
        # Sequences become tuples, so that one object can be shared between requests.
        set_ = object.__setattr__
        set_(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        set_(self, "stop_token_ids", as_token_ids("stop_token_ids", stop_token_ids))
        set_(self, "kept_special_tokens", as_token_ids("kept_special_tokens", self.kept_special_tokens))
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else _as_tuple("bad_words", self.bad_words)
        set_(self, "bad_words", bad_words)
        if self.prediction is not None and not isinstance(self.prediction, str):
            set_(self, "prediction", as_token_ids("prediction", self.prediction))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", as_token_ids("allowed_token_ids", self.allowed_token_ids))
        if isinstance(self.logit_bias, Mapping):
            ids = as_token_ids("logit_bias", list(self.logit_bias))
            set_(self, "logit_bias", dict(zip(ids, self.logit_bias.values(), strict=True)))
        if isinstance(self.extra, Mapping):
            set_(self, "extra", dict(self.extra))
        _check_sampling_params(self)

    def snapshot(self) -> SamplingParams:
        """Returns the parameters that a request keeps: this object, since it cannot change. A subclass whose objects
        can change returns a checked copy. Raises `RequestError`."""
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Number of completions to generate: `best_of` where it is given, else `n`."""
        return self.best_of if self.best_of is not None else self.n


@_names_fields
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: keep the `beam_width` sequences of highest cumulative log probability.

    The score that ranks finished beams is cumulative_logprob / length ** length_penalty, as in Hugging Face
    transformers.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Divides the logits before the log-softmax; 0 leaves them as they are."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, value in (("beam_width", self.beam_width), ("max_tokens", self.max_tokens)):
            _require(name, value, _is_a(Integral, value), "an integer")
            _require(name, value, 1 <= value <= _LARGEST, f"at least 1 and at most {_LARGEST}")
        for name, number in (("temperature", self.temperature), ("length_penalty", self.length_penalty)):
            _require(name, number, _is_a(Real, number), "a number")
        _require("temperature", self.temperature, self.temperature >= 0, "0 or more")
        # Lengths to a greater power leave what a float can hold.
        holds = -_MAX_LENGTH_PENALTY <= self.length_penalty <= _MAX_LENGTH_PENALTY
        _require(
            "length_penalty", self.length_penalty, holds, f"between -{_MAX_LENGTH_PENALTY} and {_MAX_LENGTH_PENALTY}"
        )


_NUMBERS = (
    ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    ("n", "top_k", "min_tokens"),
    ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
)
"""Fields that hold a number, an integer, and an integer or None."""

_LARGEST = (1 << 31) - 1
"""Largest value of integers other than the seed: workers keep them in machine words."""

_MAX_LENGTH_PENALTY = 10

RAW_LOGPROBS, PROCESSED_LOGPROBS = "raw_logprobs", "processed_logprobs"
"""Values of `logprobs_mode`; the names are vLLM's."""

_FLOAT32_MIN, _FLOAT32_MAX = 1e-30, 1e30
"""Range of factors of logits, so that they and their products stay within float32."""


@runtime_checkable
class _Scalar(Protocol):
    """A number of numpy or torch."""

    def item(self) -> object: ...


def as_token_ids(name: str, values: object) -> tuple[int, ...]:
    """Returns token ids as Python integers, from a list or a flat array of integers, of numpy and torch too. Raises
    `RequestError` for anything else: booleans, bytes, and sets, which have no order."""
    is_list = isinstance(values, Iterable) and not isinstance(
        values, str | bytes | bytearray | memoryview | Mapping | Set
    )
    try:
        items = iter(cast("Iterable[Any]", values)) if is_list else None
    except TypeError:  # an array of no dimensions
        items = None
    if items is None:
        raise RequestError(f"{name} must be a list of token ids, got {values!r}")
    return tuple(value if type(value) is int else _as_token_id(name, value) for value in items)


def _as_token_id(name: str, value: object) -> int:
    try:
        number = value.item() if isinstance(value, _Scalar) else value
    except (RuntimeError, ValueError):  # more than one number
        number = None
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise RequestError(f"{name} holds {value!r}, which is no token id: they are integers")
    return int(number)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable | None):
        raise RequestError(f"{name} must be a list, got {value!r}")
    return tuple(value or ())


def _is_a(kind: type, value: object) -> bool:
    """Whether the value is such a number; True and False do not count."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _require(name: str, value: object, holds: bool, range_: str) -> None:
    if not holds:
        raise RequestError(f"{name} must be {range_}, got {value!r}")


def _check_types(p: SamplingParams) -> None:
    numbers, integers, optional = _NUMBERS
    values = vars(p)
    for name in numbers:
        _require(name, values[name], _is_a(Real, values[name]), "a number")
    for name in integers:
        _require(name, values[name], _is_a(Integral, values[name]), "an integer")
    for name in optional:
        _require(name, values[name], values[name] is None or _is_a(Integral, values[name]), "None or an integer")
    for name in (*integers, *optional):
        is_small = name == "seed" or values[name] is None or values[name] <= _LARGEST
        _require(name, values[name], is_small, f"at most {_LARGEST}")
    for name in ("processors", "extra"):
        _require(name, values[name], isinstance(values[name], Mapping), "a mapping")
    is_form = isinstance(p.structured_outputs, StructuredOutputs | None)
    _require("structured_outputs", p.structured_outputs, is_form, "None or StructuredOutputs")
    if p.structured_outputs is not None and p.ignore_eos:
        raise RequestError(
            "ignore_eos goes on behind the end of an output, where a grammar allows nothing: leave out ignore_eos or"
            " structured_outputs"
        )
    _require("speculation", p.speculation, isinstance(p.speculation, str | None), "None or a drafter's name")
    _require("acceptance", p.acceptance, isinstance(p.acceptance, str | None), "None or an acceptance rule's name")


def _check_sampling_params(p: SamplingParams) -> None:
    _check_types(p)
    _require("n", p.n, p.n >= 1, "at least 1")
    _require("best_of", p.best_of, p.best_of is None or p.best_of >= p.n, f"at least n ({p.n})")
    _require("temperature", p.temperature, p.temperature >= 0, "0 (greedy) or more")
    if p.is_greedy and p.num_sequences > 1:
        raise RequestError(
            f"temperature 0 gives the same completion every time, so n and best_of must be 1, got {p.num_sequences};"
            " set a temperature, or n=1"
        )
    holds = p.temperature == 0 or _FLOAT32_MIN <= p.temperature <= _FLOAT32_MAX
    _require("temperature", p.temperature, holds, f"0 (greedy), or between {_FLOAT32_MIN} and {_FLOAT32_MAX}")
    _require("top_p", p.top_p, 0 < p.top_p <= 1, "in (0, 1]")
    _require("top_k", p.top_k, p.top_k >= -1, "-1 or 0 (all tokens), or at least 1")
    _require("min_p", p.min_p, 0 <= p.min_p <= 1, "in [0, 1]")
    _require("presence_penalty", p.presence_penalty, -2 <= p.presence_penalty <= 2, "in [-2, 2]")
    _require("frequency_penalty", p.frequency_penalty, -2 <= p.frequency_penalty <= 2, "in [-2, 2]")
    holds = _FLOAT32_MIN <= p.repetition_penalty <= _FLOAT32_MAX
    _require("repetition_penalty", p.repetition_penalty, holds, f"more than 0 ({_FLOAT32_MIN} to {_FLOAT32_MAX})")
    _require("min_tokens", p.min_tokens, p.min_tokens >= 0, "0 or more")
    if p.max_tokens is not None:
        _require("max_tokens", p.max_tokens, p.max_tokens >= 1, "at least 1, or None for the model's length")
        _require("min_tokens", p.min_tokens, p.min_tokens <= p.max_tokens, f"at most max_tokens ({p.max_tokens})")
    _require("logprobs", p.logprobs, p.logprobs is None or p.logprobs >= -1, "None, -1 (all) or at least 0")
    _check_logprobs_mode(p)
    _require(
        "prompt_logprobs",
        p.prompt_logprobs,
        p.prompt_logprobs is None or p.prompt_logprobs >= -1,
        "None, -1 (all) or at least 0",
    )
    _require(
        "truncate_prompt_tokens",
        p.truncate_prompt_tokens,
        p.truncate_prompt_tokens is None or p.truncate_prompt_tokens >= 1,
        "None or at least 1",
    )
    for name, words in (("stop", p.stop), ("bad_words", p.bad_words)):
        _require(name, words, all(isinstance(word, str) and word for word in words), "a list of non-empty strings")
    if p.stop and not p.detokenize:
        raise RequestError("stop strings need detokenize=True; use stop_token_ids to stop on tokens")
    kinds = ("cumulative", "delta", "final_only")
    _require("output_kind", p.output_kind, p.output_kind in kinds, f"one of {', '.join(kinds)}")
    if p.allowed_token_ids is not None:
        _require("allowed_token_ids", p.allowed_token_ids, len(p.allowed_token_ids) > 0, "None or a non-empty list")
    if p.logit_bias is not None:
        holds = isinstance(p.logit_bias, Mapping) and all(
            isinstance(bias, Real) and -100 <= bias <= 100 for bias in p.logit_bias.values()
        )
        _require("logit_bias", p.logit_bias, holds, "a mapping of token id to a bias in [-100, 100]")


def _check_logprobs_mode(p: SamplingParams) -> None:
    modes = (RAW_LOGPROBS, PROCESSED_LOGPROBS)
    _require("logprobs_mode", p.logprobs_mode, p.logprobs_mode in (None, *modes), f"None, {' or '.join(modes)}")
    if p.logprobs_mode is not None and p.logprobs is None:
        raise RequestError(
            f"logprobs_mode is {p.logprobs_mode!r} and logprobs are not asked for: set logprobs (0: the"
            " sampled token alone), or leave logprobs_mode out"
        )
