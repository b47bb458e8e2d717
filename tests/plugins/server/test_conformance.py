"""The bundled routes pass the suite that third parties run."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.explain.route import ExplainRoute
from dovetail.plugins.routes.health import HealthRoute
from dovetail.plugins.routes.lora import LoRARoute
from dovetail.plugins.routes.messages.route import MessagesRoute
from dovetail.plugins.routes.metrics import MetricsRoute
from dovetail.plugins.routes.models import ModelsRoute
from dovetail.plugins.routes.pause import PauseRoute
from dovetail.plugins.routes.pooling.route import PoolingRoute
from dovetail.plugins.routes.responses.route import ResponsesRoute
from dovetail.plugins.routes.tokenize import TokenizeRoute
from dovetail.plugins.routes.weights import WeightsRoute
from dovetail.plugins.server.live import live_server
from dovetail.testing.route_suite import GeneratingRouteSuite, RouteSuite


class TestHealth(RouteSuite):
    plugin = HealthRoute
    serve = staticmethod(live_server)


class TestMetrics(RouteSuite):
    plugin = MetricsRoute
    serve = staticmethod(live_server)


class TestModels(RouteSuite):
    plugin = ModelsRoute
    serve = staticmethod(live_server)


class TestTokenize(RouteSuite):
    plugin = TokenizeRoute
    serve = staticmethod(live_server)


class TestExplain(RouteSuite):
    plugin = ExplainRoute
    serve = staticmethod(live_server)


class TestLoRA(RouteSuite):
    plugin = LoRARoute
    serve = staticmethod(live_server)
    options: ClassVar[dict[str, Any]] = {"allow_updates": True}


class TestPause(RouteSuite):
    plugin = PauseRoute
    serve = staticmethod(live_server)
    options: ClassVar[dict[str, Any]] = {"allow_control": True}


class TestWeights(RouteSuite):
    plugin = WeightsRoute
    serve = staticmethod(live_server)
    options: ClassVar[dict[str, Any]] = {"allow_updates": True}


class TestPooling(RouteSuite):
    plugin = PoolingRoute
    serve = staticmethod(live_server)


class TestCompletions(GeneratingRouteSuite):
    plugin = CompletionsRoute
    serve = staticmethod(live_server)
    path = "/v1/completions"

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""The suite's model has none."""


class TestChat(GeneratingRouteSuite):
    plugin = ChatRoute
    serve = staticmethod(live_server)
    path = "/v1/chat/completions"

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "chat_template": TEMPLATE}


class TestResponses(GeneratingRouteSuite):
    plugin = ResponsesRoute
    serve = staticmethod(live_server)
    path = "/v1/responses"
    end_of_stream = b',"type":"response.incomplete"}\n\n'

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {"input": prompt, "max_output_tokens": num_tokens, "ignore_eos": True, "chat_template": TEMPLATE}


class TestMessages(GeneratingRouteSuite):
    plugin = MessagesRoute
    serve = staticmethod(live_server)
    path = "/v1/messages"
    end_of_stream = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "chat_template": TEMPLATE}
