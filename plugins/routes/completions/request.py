"""The body of /v1/completions, and what it asks of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.engine_client import EngineClient, EngineFacts
from dovetail.contracts.prompts import Prompt, TokensPrompt
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.server.prompts import Prompts, separate_prompts
from dovetail.plugins.server.sampling import sampling_params, token_limit
from dovetail.plugins.server.streams import FormOrigin
from dovetail.plugins.server.structured import form_field, response_form
from dovetail.plugins.server.transfer import TransferFields, transfer_values

_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(TransferFields, kw_only=True):
    """OpenAI's fields, vLLM's extra ones, and `return_accepted_spans`: which tokens a drafter guessed."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = _MAX_TOKENS
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
    return_accepted_spans: bool | None = None
    return_tokens_as_token_ids: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one body asks for."""

    model: str
    """The name that responses show."""
    params: SamplingParams
    echo: bool
    """Whether a completion's text starts with its prompt."""
    with_logprobs: bool
    tokens_as_ids: bool
    scores_only: bool
    """max_tokens 0: the completion is computed, since an engine always computes one token, and not shown."""
    with_token_ids: bool
    with_accepted: bool
    """Whether each token comes with its text, marked where it is an accepted draft."""
    with_prompt_logprobs: bool
    """Whether vLLM's field `prompt_logprobs` was asked for."""


def what_is_asked(body: CompletionRequest, model: str, facts: EngineFacts) -> Asked:
    """Raises `APIError` 400 for what cannot be served."""
    echo, stream = bool(body.echo), bool(body.stream)
    if body.suffix:
        message = "suffix is not served: no bundled model was trained to fill text in between; put it in the prompt"
        raise APIError(400, message, param="suffix")
    if body.best_of is not None and stream and body.best_of > (body.n or 1):
        raise APIError(
            400, "best_of: which completions are the best shows at the end; leave stream out", param="best_of"
        )
    scores_only = body.max_tokens == 0
    if scores_only and not echo:
        raise APIError(400, "max_tokens must be at least 1, or 0 with echo: true", param="max_tokens")
    given: dict[str, Any] = {
        "max_tokens": 1 if scores_only else token_limit(body.max_tokens, facts),
        "best_of": body.best_of,
        "logprobs": body.logprobs,
        "output_kind": "delta" if stream else "final_only",
        **transfer_values(body, facts),
    }
    if echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    if body.response_format is not None:
        given |= _form(body, body.response_format)
    return Asked(
        model=model,
        params=sampling_params(body, facts, **given),
        echo=echo,
        with_logprobs=body.logprobs is not None,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        scores_only=scores_only,
        with_token_ids=bool(body.return_token_ids),
        with_accepted=bool(body.return_accepted_spans),
        with_prompt_logprobs=body.prompt_logprobs is not None,
    )


def _form(body: CompletionRequest, response_format: Mapping[str, Any]) -> dict[str, Any]:
    others = {
        "structured_outputs": body.structured_outputs,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    other = next((name for name, value in others.items() if value is not None), None)
    if other is not None:
        message = f"{other} and response_format exclude each other: give one of them"
        raise APIError(400, message, param=other)
    form = response_form(response_format)
    return {} if form is None else {"structured_outputs": form}


def form_origin(body: CompletionRequest) -> FormOrigin:
    """Which field asks for the form of the output, where one does."""
    return FormOrigin(form_field(body) or "response_format")


async def prompts_of(body: CompletionRequest, asked: Asked, engine: EngineClient) -> Sequence[Prompt]:
    """One prompt or several. Raises `APIError` 400 for what is neither, `RequestError` for text without a tokenizer."""
    separate = separate_prompts(body.prompt, "prompt")
    limit = engine.facts.max_completions
    if len(separate) > 1 and len(separate) * asked.params.num_sequences > limit:
        message = f"the completions of {len(separate)} prompts are more than model.max_completions, {limit}: send fewer"
        raise APIError(400, message, param="prompt")
    prompts: list[Prompt] = []
    for given in separate:
        if isinstance(given, str) and body.add_special_tokens is False:
            ids = await engine.tokenize(given, add_special_tokens=False)
            prompts.append(TokensPrompt(prompt=given, prompt_token_ids=ids))
        elif isinstance(given, list) and asked.echo:
            text = await engine.detokenize(given)
            prompts.append(TokensPrompt(prompt=text, prompt_token_ids=given))
        else:
            prompts.append(given)
    return prompts
