import msgspec
from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.server.bodies import Body, Ignored
from dovetail.plugins.server.structured import FormFields
from typing import Annotated, Any

MAX_STRINGS = 1024
Strings = Annotated[list[str], msgspec.Meta(max_length=MAX_STRINGS)]

class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class SamplingFields(FormFields, kw_only=True):
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
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    def end_user(self) -> str | None: ...

def sampling_params(fields: SamplingFields, facts: EngineFacts, **given: Any) -> SamplingParams: ...
def token_limit(asked: int | None, facts: EngineFacts) -> int | None: ...
def with_param(error: RequestError) -> APIError: ...
