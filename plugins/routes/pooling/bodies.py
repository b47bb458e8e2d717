"""Bodies of requests that are pooled, and the `PoolingParams` that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.route import APIError
from dovetail.plugins.server.bodies import Body
from dovetail.plugins.server.prompts import Prompts, separate_prompts
from dovetail.plugins.server.sampling import with_param

Format = Literal["float", "base64"]
"""Numbers of JSON, or float32 in little-endian order as base64."""


class PoolingFields(Body, kw_only=True):
    """What all of them share. null means that a field was not given."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None

    def end_user(self) -> str | None:
        """See `SamplingFields.end_user`."""
        return self.user or None


class InputFields(PoolingFields, kw_only=True):
    """Texts, each of which is pooled by itself."""

    input: Prompts
    add_special_tokens: bool | None = None


class EmbeddingRequest(InputFields, kw_only=True):
    """OpenAI's fields, vLLM's extra ones, and `normalize`."""

    encoding_format: Format | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class ClassifyRequest(InputFields, kw_only=True):
    """vLLM's fields."""

    use_activation: bool | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """vLLM's fields: any task."""

    task: str | None = None
    use_activation: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """vLLM's fields. Both sides are named by one of `SIDES`."""

    text_1: Prompts | None = None
    text_2: Prompts | None = None
    queries: Prompts | None = None
    documents: Prompts | None = None
    items: Prompts | None = None
    data_1: Prompts | None = None
    data_2: Prompts | None = None
    use_activation: bool | None = None


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of a score."""


class DocumentText(Body, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """vLLM's fields, and `return_documents` of others."""

    query: str
    documents: list[str | DocumentText]
    top_n: int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


def pooling_params(fields: PoolingFields, facts: EngineFacts, task: str, **given: Any) -> PoolingParams:
    """The parameters of a request; `given` are further ones of `PoolingParams`. Raises `APIError` 400 that names the
    field, or "model" where the model does not serve the task."""
    if fields.priority and not facts.has_priorities:
        message = f"the scheduler {facts.scheduler!r} knows no priorities: leave priority out, or choose another"
        raise APIError(400, message, param="priority")
    keep = fields.truncate_prompt_tokens
    try:
        params = PoolingParams(task=task, truncate_prompt_tokens=facts.max_model_len if keep == -1 else keep, **given)
    except RequestError as error:
        raise with_param(error) from None
    if task not in facts.pooling.poolers:
        served = ", ".join(facts.pooling.poolers) or "none"
        reason = facts.pooling.refusals.get(task, "no pooler serves it")
        message = f"this server does not serve the pooling task {task!r} (served: {served}): {reason}"
        raise APIError(400, message, param="model")
    return params


def texts_of(given: Prompts, field: str, limit: int) -> Sequence[str | list[int]]:
    """Prompts of a field. Raises `APIError` 400 where there is none, where one is empty, and for more than `limit`."""
    texts = separate_prompts(given, field)
    check_count(len(texts), field, limit)
    for index, text in enumerate(texts):
        if not text:
            where = field_of(field, index, len(texts))
            raise APIError(400, f"{where} is empty: give text or token ids", param=where)
    return texts


def check_count(count: int, field: str, limit: int) -> None:
    """Raises `APIError` 400 for more than `limit`."""
    if count > limit:
        message = f"{field} has {count} entries, and the server takes {limit} in one request: send several requests"
        raise APIError(400, message, param=field)


def field_of(field: str, index: int, count: int) -> str:
    """Where one of `count` prompts of a field is."""
    return field if count == 1 else f"{field}.{index}"


def sides_of(body: ScoreRequest) -> tuple[tuple[str, Prompts], tuple[str, Prompts]]:
    """Name and value of the two sides. Raises `APIError` 400 where one is missing, and for other combinations."""
    names = dict.fromkeys(name for sides in SIDES for name in sides)
    values = {name: value for name in names if (value := getattr(body, name)) is not None}
    for first, second in SIDES:
        if values.keys() == {first, second}:
            return (first, values[first]), (second, values[second])
    known = "; ".join(f"{first} and {second}" for first, second in SIDES)
    got = ", ".join(values) or "none of them"
    missing = next(
        (other for sides in SIDES for other in sides if set(values) < set(sides) and other not in values), None
    )
    raise APIError(400, f"a score is of two sides, {known}, got {got}", param=missing if values else "text_1")
