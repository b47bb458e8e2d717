"""The endpoints /v1/embeddings, /classify, /score, /rerank and /pooling."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.pooling_params import CLASSIFY, EMBED, PooledStates, PoolingParams
from dovetail.contracts.prompts import TokensPrompt
from dovetail.contracts.route import APIError, Route, RouteHost, ServedModel
from dovetail.plugins.routes.pooling.answers import Input, answers_of, usage_of
from dovetail.plugins.routes.pooling.bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    Format,
    InputFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    field_of,
    pooling_params,
    sides_of,
    texts_of,
)
from dovetail.plugins.routes.pooling.scores import Scores, Side, check_pairs, score_params, scores_of
from dovetail.plugins.server.bodies import BodyReader, body_schema, json_response
from dovetail.plugins.server.streams import PooledSubmission, pooled_submission


class PoolingRouteOptions(PluginOptions):
    """Limits of one request."""

    max_inputs: int = Field(default=2048, ge=1, description="Texts that one request may have, as OpenAI's API")
    inputs_at_once: int = Field(
        default=256,
        ge=1,
        description="Texts of one request that are in the engine at once; no more than server.max_num_waiting allows",
    )


class PoolingRoute(Route):
    """POST /v1/embeddings, /classify, /score, /rerank and /pooling."""

    contract = (1, 8)
    Options = PoolingRouteOptions
    options: PoolingRouteOptions

    def __init__(self, options: PoolingRouteOptions, host: RouteHost):
        super().__init__(options, host)
        self._embeddings = BodyReader(EmbeddingRequest)
        self._classifications = BodyReader(ClassifyRequest)
        self._poolings = BodyReader(PoolingRequest)
        self._scores = BodyReader(ScoreRequest)
        self._reranks = BodyReader(RerankRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["pooling"])
        router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))(self.embed)
        router.post("/classify", openapi_extra=body_schema(ClassifyRequest))(self.classify)
        router.post("/pooling", openapi_extra=body_schema(PoolingRequest))(self.pool)
        for prefix in ("", "/v1"):
            router.post(f"{prefix}/score", openapi_extra=body_schema(ScoreRequest))(self.score)
        for prefix in ("", "/v1", "/v2"):  # as vLLM has them: clients of Jina ask /v1, those of Cohere /v2
            router.post(f"{prefix}/rerank", openapi_extra=body_schema(RerankRequest))(self.rerank)
        return router

    async def embed(self, request: Request) -> Response:
        """A vector for each text."""
        body = await self._embeddings.read(request)
        model = await self.host.find_model(body.model)
        params = pooling_params(
            body, self.host.engine.facts, EMBED, dimensions=body.dimensions, normalize=body.normalize
        )
        how = self._submission(request, body, params, model, "embd")
        return await self._results(body, how, model, kind="embedding", key="embedding")

    async def classify(self, request: Request) -> Response:
        """The label that fits each text best, and the scores of all labels."""
        body = await self._classifications.read(request)
        model = await self.host.find_model(body.model)
        facts = self.host.engine.facts
        params = pooling_params(body, facts, CLASSIFY, use_activation=body.use_activation)
        how = self._submission(request, body, params, model, "classify")
        inputs, at_once = await self._inputs(body), self.options.inputs_at_once
        answers = await answers_of(self.host.engine, inputs, how, PooledStates.floats, at_once)
        data = [_classified(i, answer.value, facts.pooling.labels) for i, answer in enumerate(answers)]
        return json_response({**self._head(how, model), "data": data, "usage": usage_of(answers)})

    async def pool(self, request: Request) -> Response:
        """What a task makes of each text: a vector, scores, or one of these for each token."""
        body = await self._poolings.read(request)
        model = await self.host.find_model(body.model)
        given = {"dimensions": body.dimensions, "normalize": body.normalize, "use_activation": body.use_activation}
        params = pooling_params(body, self.host.engine.facts, body.task or EMBED, **given)
        how = self._submission(request, body, params, model, "pool")
        return await self._results(body, how, model, kind="pooling", key="data")

    async def score(self, request: Request) -> Response:
        """How well texts go together, pair by pair."""
        body = await self._scores.read(request)
        model = await self.host.find_model(body.model)
        first, second = (Side(name, texts_of(value, name, self.options.max_inputs)) for name, value in sides_of(body))
        check_pairs(first, second)
        how = self._submission(request, body, score_params(body, self.host.engine.facts), model, "score")
        scores = await self._score(first, second, how)
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)]
        return json_response({**self._head(how, model), "data": data, "usage": scores.usage})

    async def rerank(self, request: Request) -> Response:
        """Documents in order of how well they go with a query, the best first."""
        body = await self._reranks.read(request)
        model = await self.host.find_model(body.model)
        query, documents = self._sides_of(body)
        how = self._submission(request, body, score_params(body, self.host.engine.facts), model, "rerank")
        scores = await self._score(query, documents, how)
        results = []
        for index in sorted(range(len(scores.values)), key=lambda i: -scores.values[i])[: body.top_n or None]:
            shown = {} if body.return_documents is False else {"document": {"text": documents.texts[index]}}
            results.append({"index": index, **shown, "relevance_score": scores.values[index]})
        return json_response({"id": how.response_id, "model": model.name, "usage": scores.usage, "results": results})

    def _sides_of(self, body: RerankRequest) -> tuple[Side, Side]:
        if body.top_n is not None and body.top_n < 0:
            raise APIError(400, f"top_n must be 1 or more, or 0 for all, got {body.top_n}", param="top_n")
        documents = [one if isinstance(one, str) else one.text for one in body.documents]
        limit = self.options.max_inputs
        query = texts_of(body.query, "query", limit)
        return Side("query", query), Side("documents", texts_of([*documents], "documents", limit))

    async def _results(
        self, body: EmbeddingRequest, how: PooledSubmission, model: ServedModel, *, kind: str, key: str
    ) -> Response:
        engine = self.host.engine
        inputs = await self._inputs(body)
        answers = await answers_of(engine, inputs, how, _writer(body.encoding_format), self.options.inputs_at_once)
        data = [{"object": kind, "index": i, key: answer.value} for i, answer in enumerate(answers)]
        return json_response({**self._head(how, model), "data": data, "usage": usage_of(answers)})

    async def _inputs(self, body: InputFields) -> list[Input]:
        texts = texts_of(body.input, "input", self.options.max_inputs)
        inputs = []
        for index, text in enumerate(texts):
            field = field_of("input", index, len(texts))
            if isinstance(text, str) and body.add_special_tokens is False:
                ids = await self.host.engine.tokenize(text, add_special_tokens=False)
                inputs.append(Input(TokensPrompt(prompt=text, prompt_token_ids=ids), field))
            else:
                inputs.append(Input(text, field))
        return inputs

    async def _score(self, first: Side, second: Side, how: PooledSubmission) -> Scores:
        return await scores_of(self.host.engine, first, second, how, self.options.inputs_at_once)

    def _submission(
        self, request: Request, body: PoolingFields, params: PoolingParams, model: ServedModel, prefix: str
    ) -> PooledSubmission:
        return pooled_submission(request, body, params, prefix=prefix, lora_request=model.lora_request)

    def _head(self, how: PooledSubmission, model: ServedModel) -> dict[str, Any]:
        return {"id": how.response_id, "object": "list", "created": int(time.time()), "model": model.name}


def _classified(index: int, scores: list[float], labels: Sequence[str]) -> dict[str, Any]:
    """An entry of /classify, of vLLM's form. Labels of a pooler that goes by no score head have no names."""
    best = max(range(len(scores)), key=scores.__getitem__)
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": scores, "num_classes": len(scores)}


def _writer(encoding: Format | None) -> Callable[[PooledStates], Any]:
    """What puts a result into a response."""
    return _as_base64 if encoding == "base64" else _as_numbers


def _as_base64(states: PooledStates) -> str:
    return base64.b64encode(states.data).decode()


def _as_numbers(states: PooledStates) -> orjson.Fragment:
    """A list of numbers, or for each token one."""
    numbers = states.floats()
    if len(states.shape) == 1:
        return orjson.Fragment(orjson.dumps(numbers))
    width = states.shape[1]
    return orjson.Fragment(orjson.dumps([numbers[i : i + width] for i in range(0, len(numbers), width)]))
