"""Fields of a request that become `SamplingParams`: OpenAI's, and all of vLLM's extra ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.server.bodies import Body, Ignored
from dovetail.plugins.server.structured import FormFields, structured_outputs

MAX_STRINGS = 1024
"""Of one field: each is looked for in every piece of text, or tokenized."""

Strings = Annotated[list[str], msgspec.Meta(max_length=MAX_STRINGS)]
"""A list of strings that cost something each."""


class StreamOptions(Body, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class SamplingFields(FormFields, kw_only=True):
    """What requests for generated text share. null means that a field was not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    speculation: str | None = None
    acceptance: str | None = None
    processors: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None

    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    user: str | None = None
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`."""

    # They change nothing that this server does.
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    def end_user(self) -> str | None:
        """For whom the request is, where it says so."""
        return self.user or self.safety_identifier or None


_PASSED_ON = frozenset(SamplingFields.__struct_fields__) & frozenset(SamplingParams.__dataclass_fields__)

_FIELDS = (
    frozenset(SamplingFields.__struct_fields__)
    | frozenset(SamplingParams.__dataclass_fields__)
    | frozenset(PoolingParams.__dataclass_fields__)
)
"""What the message of a refusal may begin with."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
"""`int` takes more: signs, spaces, underscores, digits of other scripts."""
_MOST_SHOWN = 8

_REFUSED: Mapping[str, tuple[object, str]] = {
    "spaces_between_special_tokens": (True, "tokens are joined as the tokenizer's decoder joins them"),
    "use_beam_search": (False, "beam search runs offline only: LLM.beam_search"),
    "length_penalty": (1.0, "it is for beam search, which runs offline only: LLM.beam_search"),
}
"""Fields with the one value that is served, and the reason."""


def sampling_params(fields: SamplingFields, facts: EngineFacts, **given: Any) -> SamplingParams:
    """The parameters of a request. A field that it does not give has the value of the model's generation config, or
    else that of `SamplingParams`. `given` outranks both, but for None where the generation config has a value.

    Raises `APIError` 400 that names the field.
    """
    asked = {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
    for name, (served, reason) in _REFUSED.items():
        if asked.get(name, served) != served:
            raise APIError(400, f"{name} must be {str(served).lower()} or left out: {reason}", param=name)
    if fields.priority and not facts.has_priorities:
        message = f"the scheduler {facts.scheduler!r} knows no priorities: leave priority out, or choose another"
        raise APIError(400, message, param="priority")
    if fields.stream_options is not None and not fields.stream:
        raise APIError(400, "stream_options need stream: true", param="stream_options")
    asked.pop("structured_outputs", None)
    form = structured_outputs(fields)
    if form is not None:
        asked["structured_outputs"] = form
    given = {name: value for name, value in given.items() if value is not None or name not in facts.default_sampling}
    values = {**facts.default_sampling, **{name: asked[name] for name in _PASSED_ON if name in asked}, **given}
    if fields.logit_bias is not None:
        if len(fields.logit_bias) > facts.vocab_size:
            message = f"logit_bias has {len(fields.logit_bias)} entries, and the vocabulary {facts.vocab_size} tokens"
            raise APIError(400, message, param="logit_bias")
        values["logit_bias"] = _by_token_id(fields.logit_bias)
    if fields.truncate_prompt_tokens == -1:
        values["truncate_prompt_tokens"] = max(1, facts.max_model_len - (values.get("max_tokens") or 1))
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise with_param(error) from None


def token_limit(asked: int | None, facts: EngineFacts) -> int | None:
    """`SamplingParams.max_tokens` of a request that asks for `asked`: else the generation config's; None: the model's
    length."""
    return facts.default_sampling.get("max_tokens") if asked is None else asked


def with_param(error: RequestError) -> APIError:
    """The refusal of a request, with the field that its message begins with as `param`."""
    name = str(error).partition(" ")[0]
    return APIError(400, str(error), param=name if name in _FIELDS else None)


def _by_token_id(biases: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in biases if _TOKEN_ID.fullmatch(key) is None]
    if wrong:
        keys = ", ".join(map(repr, wrong[:_MOST_SHOWN])) + (", ..." if len(wrong) > _MOST_SHOWN else "")
        raise APIError(400, f"logit_bias has keys that are no token ids: {keys}", param="logit_bias")
    return {int(token): bias for token, bias in biases.items()}
