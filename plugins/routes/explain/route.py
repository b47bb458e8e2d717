"""The endpoints under /v1/explain."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.engine_client import RequestReport
from dovetail.contracts.errors import RequestError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError, Route, RouteHost
from dovetail.plugins.routes.chat.request import ChatRequest
from dovetail.plugins.routes.completions.request import CompletionRequest
from dovetail.plugins.routes.explain.bodies import Prepared, Preparer
from dovetail.plugins.routes.explain.plans import plan_as_data
from dovetail.plugins.routes.explain.reports import report_as_data
from dovetail.plugins.routes.messages.request import MessagesRequest
from dovetail.plugins.routes.responses.request import ResponsesRequest
from dovetail.plugins.server.bodies import body_schema, json_response
from dovetail.plugins.server.request_ids import MAX_ID_CHARS
from dovetail.plugins.server.sampling import with_param
from dovetail.plugins.server.streams import is_of_response

_PREFIXES = ("", "cmpl-", "chatcmpl-", "msg-", "resp_", "embd-", "score-", "rerank-", "pool-")
"""Of ids of responses, which may be left out."""


class ExplainRoute(Route):
    """POST /v1/explain/... says what an endpoint would do with a body, GET /v1/explain/ID what was done for a request
    that runs or has lately ended."""

    contract = (1, 8)

    def __init__(self, options: PluginOptions, host: RouteHost):
        super().__init__(options, host)
        self._prepare = Preparer(host)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["explain"])
        router.post("/v1/explain/completions", openapi_extra=body_schema(CompletionRequest))(self.plan_completions)
        router.post("/v1/explain/chat/completions", openapi_extra=body_schema(ChatRequest))(self.plan_chat)
        router.post("/v1/explain/messages", openapi_extra=body_schema(MessagesRequest))(self.plan_messages)
        router.post("/v1/explain/responses", openapi_extra=body_schema(ResponsesRequest))(self.plan_responses)
        router.get("/v1/explain/{request_id:path}")(self.report)
        return router

    async def plan_completions(self, request: Request) -> Response:
        """What /v1/completions would do with the body."""
        return await self._plan(await self._prepare.completions(request))

    async def plan_chat(self, request: Request) -> Response:
        """What /v1/chat/completions would do with the body."""
        return await self._plan(await self._prepare.chat(request))

    async def plan_messages(self, request: Request) -> Response:
        """What /v1/messages would do with the body."""
        return await self._plan(await self._prepare.messages(request))

    async def plan_responses(self, request: Request) -> Response:
        """What /v1/responses would do with the body."""
        return await self._plan(await self._prepare.responses(request))

    async def report(self, request_id: str) -> Response:
        """What was done for a request, by the id of its response."""
        engine = self.host.engine
        if not 0 < len(request_id) <= 2 * MAX_ID_CHARS:
            raise APIError(404, "this is no id of a response", param="request_id")
        names = [prefix + request_id for prefix in _PREFIXES]
        found = await asyncio.gather(*map(engine.explain_request, names))
        requests = [
            report
            for name, reports in zip(names, found, strict=True)
            for report in reports.requests
            if _is_named(report, name)
        ]
        if not requests:
            message = (
                f"the engine knows no request {request_id!r}: it remembers those that run and the"
                f" {found[0].num_kept} that ended last (server.kept_requests), since it started"
            )
            raise APIError(404, message, param="request_id")
        content = {
            "object": "explanation",
            "id": request_id,
            "requests": [report_as_data(report, engine.facts) for report in requests],
        }
        return json_response(content)

    async def _plan(self, prepared: Prepared) -> Response:
        engine = self.host.engine
        try:
            plans = [await engine.plan_request(prompt, prepared.params) for prompt in prepared.prompts]
        except RequestError as error:
            raise with_param(error) from None
        return json_response(plan_as_data(prepared, plans, engine.facts))


def _is_named(report: RequestReport, name: str) -> bool:
    """Whether a request has this id, or its response has."""
    request_id = report.stats.request_id
    return request_id == name or is_of_response(request_id, name)
