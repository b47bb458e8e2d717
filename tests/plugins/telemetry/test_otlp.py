"""The `otlp` sink, against collectors that decode what comes over a socket."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from dovetail import LLMEngine, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment
from dovetail.contracts.telemetry import RequestStats
from dovetail.plugins.telemetry.otlp.sink import OTLPOptions, OTLPSink
from dovetail.testing.telemetry_suite import ENGINE, TelemetrySinkSuite, assignment
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

MakeRequest = Callable[..., RequestStats]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HERE = Environment(device_type="cpu", num_cpus=1, memory_bytes=1)
LONG = SamplingParams(max_tokens=6, ignore_eos=True)


class Collector:
    """What came, over whatever protocol."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.go_on = threading.Event()
        """Answers wait for it."""
        self.go_on.set()
        self.arrived = threading.Event()

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.requests.append(request)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        self.arrived.set()
        assert self.go_on.wait(60)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)

    def by_name(self, request_id: str) -> dict[str, Span]:
        """The spans of a request; its own is called "request"."""
        [own] = [span for span in self.spans if attributes(span).get("gen_ai.response.id") == request_id]
        inside = {span.name: span for span in self.spans if span.parent_span_id == own.span_id}
        return {"request": own, **inside}


def attributes(owner: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {item.key: _plain(item.value) for item in owner.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def http_collector() -> Iterator[Collector]:
    """OTLP/HTTP with protobuf."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            collector.paths.append(self.path)
            collector.take(ExportTraceServiceRequest.FromString(body), dict(self.headers.items()))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        collector.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """OTLP/gRPC."""
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            collector.take(request, dict(context.invocation_metadata()))
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traced")
    save_tiny_model(directory, tiny_config("llama", max_position_embeddings=512))
    return directory


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[Callable[..., LLMEngine]]:
    engines = []

    def make(**options: Any) -> LLMEngine:
        engine = LLMEngine.from_config(
            model={"path": str(tiny_model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
            cache={"block_size": 4, "num_blocks": 100},
            executor={"threads": 1},
            telemetry=[{"name": "otlp", **options}],
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


def run_all(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def started(**options: Any) -> OTLPSink:
    sink = OTLPSink(OTLPOptions(**options))
    sink.on_start(ENGINE)
    return sink


class TestConforms(TelemetrySinkSuite):
    plugin = OTLPSink

    @pytest.fixture
    def options(self, collector: Collector) -> dict[str, Any]:
        return {"endpoint": collector.endpoint}


def test_a_request_of_an_engine_has_its_phases(make_engine: Any, collector: Collector) -> None:
    engine = make_engine(endpoint=collector.endpoint, service_name="mine", model_name="tiny", headers={"X-Key": "k"})
    engine.add_request("r", [5, 6, 7], SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True, temperature=0.5))
    run_all(engine)
    engine.shutdown()
    spans = collector.by_name("r")
    assert spans.keys() == {"request", "queue", "prefill", "decode"}
    request = spans["request"]
    assert (request.name, request.parent_span_id) == ("text_completion tiny", b"")
    # One phase begins where the one before ends, and together they are the request.
    edges = [request.start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].start_time_unix_nano == edges[-1]
        assert spans[name].trace_id == request.trace_id
        edges.append(spans[name].end_time_unix_nano)
    assert edges == sorted(edges)
    assert edges[-1] == request.end_time_unix_nano
    found = attributes(request)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "dovetail",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 12,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert collector.resource["service.name"] == "mine"
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["x-key"] == "k"


def test_the_trace_of_the_caller_goes_on(make_engine: Any, collector: Collector) -> None:
    engine = make_engine(endpoint=f"{collector.endpoint}/v1/traces")
    headers = {"Traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    engine.add_request("r", [5, 6], LONG, trace_headers=headers)
    run_all(engine)
    engine.shutdown()
    request = collector.by_name("r")["request"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.trace_state == "vendor=1"


def test_a_trace_that_the_caller_does_not_sample_is_not_sent(make_engine: Any, collector: Collector) -> None:
    engine = make_engine(endpoint=collector.endpoint)
    for name, flags in (("kept", "01"), ("not", "00")):
        engine.add_request(name, [5, 6], LONG, trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
    run_all(engine)
    engine.shutdown()
    assert {attributes(span).get("gen_ai.response.id") for span in collector.spans} == {"kept", None}
    assert len(collector.spans) == 4


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", "00-é-é-01"])
def test_a_malformed_trace_is_ignored(make_request_stats: MakeRequest, collector: Collector, parent: str) -> None:
    sink = started(endpoint=collector.endpoint)
    sink.on_request(make_request_stats(trace_context={"traceparent": parent}))
    sink.close()
    request = collector.by_name("r1")["request"]
    assert request.parent_span_id == b""
    assert request.trace_id.hex() != TRACE


def test_a_request_that_was_never_scheduled_only_waited(make_request_stats: MakeRequest, collector: Collector) -> None:
    sink = started(endpoint=collector.endpoint)
    sink.on_request(make_request_stats(first_scheduled_time=None, first_token_time=None, finish_reason="abort"))
    sink.close()
    assert collector.by_name("r1").keys() == {"request", "queue"}


def test_a_failed_request_is_an_error(make_request_stats: MakeRequest, collector: Collector) -> None:
    sink = started(endpoint=collector.endpoint)
    sink.on_request(make_request_stats(finish_reason="error", error_type="ValueError", drafter="a", num_drafted=7))
    sink.close()
    request = collector.by_name("r1")["request"]
    found = attributes(request)
    assert (request.status.code, found["error.type"]) == (2, "ValueError")
    assert (found["dovetail.drafter"], found["dovetail.draft_tokens"]) == ("a", 7)


def test_the_arm_of_an_experiment_is_told(make_request_stats: MakeRequest, collector: Collector) -> None:
    sink = started(endpoint=collector.endpoint)
    sink.on_request(make_request_stats(assignment=assignment(1)))
    sink.on_request(make_request_stats(request_id="r2"))
    sink.close()
    found = attributes(collector.by_name("r1")["request"])
    assert (found["dovetail.experiment"], found["dovetail.arm"]) == ("drafts", "lookup")
    assert not {"dovetail.experiment", "dovetail.arm"} & attributes(collector.by_name("r2")["request"]).keys()


def test_grpc(make_engine: Any) -> None:
    with grpc_collector() as collector:
        engine = make_engine(endpoint=collector.endpoint, protocol="grpc", headers={"X-Key": "k"})
        engine.add_request("r", [5, 6], LONG, trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        run_all(engine)
        engine.shutdown()
    assert collector.by_name("r")["request"].trace_id.hex() == TRACE
    assert collector.headers[0]["x-key"] == "k"


def test_an_engine_goes_on_without_its_collector(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:  # bound, and listens to nobody
        nobody.bind(("127.0.0.1", 0))
        engine = make_engine(endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", flush_s=0.1, timeout_s=0.2)
        with caplog.at_level(logging.WARNING):
            for number in range(5):
                engine.add_request(f"r{number}", [5, 6], LONG)
                run_all(engine)
            engine.shutdown()
    assert "switched off" not in caplog.text


def test_a_full_queue_drops_and_says_so_once(
    make_request_stats: MakeRequest, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector holds its first answer; what is put meanwhile fills the queue, and putting never waits."""
    collector.go_on.clear()
    sink = started(endpoint=collector.endpoint, queue_size=2, timeout_s=60)
    sink.on_request(make_request_stats(request_id="first"))
    assert collector.arrived.wait(60)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            sink.on_request(make_request_stats(request_id=f"r{number}"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "drops traces: 2 requests wait" in caplog.text
    collector.go_on.set()
    sink.close()
    ids = [attributes(span).get("gen_ai.response.id") for span in collector.spans]
    assert [name for name in ids if name is not None] == ["first", "r0", "r1"]
    assert sink._sender.num_dropped == 3


def test_the_end_does_not_wait_for_a_collector_that_hangs(
    make_request_stats: MakeRequest, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.go_on.clear()
    sink = started(endpoint=collector.endpoint, flush_s=0.05, timeout_s=60)
    sink.on_request(make_request_stats())
    assert collector.arrived.wait(60)
    with caplog.at_level(logging.WARNING):
        sink.close()  # returns, while the export still hangs
    assert not collector.go_on.is_set()
    assert "ends before its last traces are sent" in caplog.text


def test_no_thread_is_left(collector: Collector) -> None:
    before = set(threading.enumerate())  # a sink that was closed before may not have ended its last export yet
    sink = started(endpoint=collector.endpoint)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert "dovetail-otlp" in names
    sink.close()
    assert "dovetail-otlp" not in [thread.name for thread in set(threading.enumerate()) - before]


@pytest.mark.parametrize(("protocol", "package"), [("http/protobuf", "http"), ("grpc", "grpc")])
def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch, protocol: str, package: str) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name.endswith(package):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    assert OTLPSink.check(None, OTLPOptions(protocol=protocol), HERE) == [
        f"protocol {protocol} needs opentelemetry-exporter-otlp-proto-{package}, not installed:"
        " pip install 'dovetail[otlp]'"
    ]


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "http://collector:x"])
def test_an_endpoint_that_is_no_url_is_refused(make_engine: Any, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no URL: write http://host:port"):
        make_engine(endpoint=endpoint)
