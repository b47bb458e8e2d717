import httpx, pytest, socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dovetail.contracts.route import Route
from dovetail.testing.suite import PluginSuite
from dovetail.testing.watched_engine import WatchedEngine
from typing import Any, ClassVar

__all__ = [
    "GeneratingRouteSuite",
    "RouteSuite",
]

class GeneratingRouteSuite(RouteSuite):
    path: ClassVar[str]
    body_template: ClassVar[Mapping[str, Any] | None] = None
    streams: ClassVar[Mapping[str, Any] | None] = {'stream': True}
    end_of_stream: ClassVar[bytes] = b'data: [DONE]\n\n'
    @classmethod
    def reason_incomplete(cls) -> str | None: ...
    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]: ...
    def extra(self, request: pytest.FixtureRequest) -> Mapping[str, Any]: ...
    def stream(self) -> Mapping[str, Any]: ...
    def ask(
        self,
        live: Live,
        extra: Mapping[str, Any],
        num_tokens: int = 8,
        **fields: Any,
    ) -> httpx.Response: ...
    @contextmanager
    def connection(self, live: Live, body: Mapping[str, Any]) -> Iterator[socket.socket]: ...


class RouteSuite(PluginSuite):
    kind: ClassVar[str] = 'route'
    plugin: ClassVar[type[Route]]
    function_attributes: ClassVar[frozenset[str]] = frozenset({'serve'})
    options: ClassVar[Mapping[str, Any]] = {}
    serve: ClassVar[Serve]
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedEngine]: ...
    def live(self, engine: WatchedEngine) -> Iterator[Live]: ...
    def server(self, engine: WatchedEngine, **settings: Any) -> AbstractContextManager[Live]: ...
    def endpoints(self, live: Live) -> dict[str, list[str]]: ...
