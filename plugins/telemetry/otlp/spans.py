"""From a request that ended to its spans: the request itself and, below it, `queue`, `prefill` and `decode`.

Names of attributes are those of OpenTelemetry's semantic conventions 1.41.0 (GenAI, status Development); what they lack
begins with "dovetail.".
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from dovetail.contracts.telemetry import RequestStats

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
OPERATION = "text_completion"
Phase = tuple[str, float, float]
"""Name, begin and end."""


class SpanMaker:
    """Makes spans in one thread. Whether a trace is sampled follows from its parent, or else from the variable
    OTEL_TRACES_SAMPLER."""

    def __init__(self, service_name: str):
        self.model = ""
        self._ended = _Ended()
        # Nothing of it is global, and nobody but its owner ends it.
        provider = TracerProvider(resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("dovetail", schema_url=SCHEMA)
        self._propagator = TraceContextTextMapPropagator()

    def spans_of(self, stats: RequestStats) -> list[ReadableSpan]:
        """The spans of a request; none where its trace is not sampled."""
        # The engine's times are those of a clock that nobody else reads.
        offset = time.time() - time.monotonic()
        parent = self._propagator.extract(stats.trace_context, Context())  # a malformed one is ignored
        request = self._tracer.start_span(
            f"{OPERATION} {self.model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes_of(stats, self.model),
            start_time=_nanoseconds(stats.arrival_time + offset),
        )
        if stats.finish_reason == "error":
            request.set_status(StatusCode.ERROR)
        inside = set_span_in_context(request, Context())
        for name, begin, end in phases_of(stats):
            span = self._tracer.start_span(name, context=inside, start_time=_nanoseconds(begin + offset))
            span.end(_nanoseconds(end + offset))
        request.end(_nanoseconds(stats.finish_time + offset))
        return self._ended.take()


def phases_of(stats: RequestStats) -> list[Phase]:
    """What a request went through, as far as it came."""
    scheduled, first, finish = stats.first_scheduled_time, stats.first_token_time, stats.finish_time
    phases = [("queue", stats.arrival_time, scheduled if scheduled is not None else finish)]
    if scheduled is not None:
        phases.append(("prefill", scheduled, first if first is not None else finish))
    if first is not None:
        phases.append(("decode", first, finish))
    return phases


def attributes_of(stats: RequestStats, model: str) -> dict[str, AttributeValue]:
    """Attributes of the request's span."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": "dovetail",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": stats.temperature,
        "gen_ai.request.top_p": stats.top_p,
        "gen_ai.response.id": stats.request_id,
        "gen_ai.response.finish_reasons": [stats.finish_reason],
        "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
        "gen_ai.usage.output_tokens": stats.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
        "dovetail.weight_version": stats.weight_version,
        "dovetail.preemptions": stats.num_preemptions,
    }
    if stats.n != 1:
        attributes["gen_ai.request.choice.count"] = stats.n
    if stats.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = stats.max_tokens
    if stats.first_token_time is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = stats.first_token_time - stats.arrival_time
    if stats.error_type is not None:
        attributes["error.type"] = stats.error_type
    if stats.adapter:
        attributes["dovetail.adapter"] = stats.adapter
    if stats.assignment is not None:
        attributes["dovetail.experiment"] = stats.assignment.experiment
        attributes["dovetail.arm"] = stats.assignment.arm
    if stats.drafter is not None:
        attributes["dovetail.drafter"] = stats.drafter
        attributes["dovetail.draft_tokens"] = stats.num_drafted
        attributes["dovetail.accepted_tokens"] = stats.num_accepted
    return attributes


class _Ended(SpanProcessor):  # type: ignore[misc]  # of a package without types here
    """Keeps spans that ended until they are taken."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keeps a span."""
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        """Returns and forgets them."""
        spans, self._spans = self._spans, []
        return spans


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
