from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.dialect import DialectRequest
from dovetail.contracts.prompts import ChatPrompt, PrefixVerdict, TokensPrompt
from dovetail.contracts.route import RouteHost
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.server.streams import FormOrigin
from dovetail.plugins.server.structured import FormFields
from dovetail.plugins.server.turns.tools import ToolSet
from typing import Any

MAX_SHOWN = 8

@dataclass(frozen=True, kw_only=True)
class Turn:
    messages: Sequence[Mapping[str, Any]]
    tools: ToolSet = field(default_factory=ToolSet)
    response_format: str | None = None
    form: StructuredOutputs | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    def request(self, tail: str = '') -> DialectRequest: ...


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    prompt: TokensPrompt
    params: SamplingParams
    request: DialectRequest
    prefix: PrefixVerdict | None = None

async def prepare(host: RouteHost, turn: Turn, params: SamplingParams) -> PreparedTurn: ...
def form_origin(fields: FormFields, prepared: PreparedTurn, format_field: str) -> FormOrigin: ...
async def render(host: RouteHost, turn: Turn) -> ChatPrompt: ...
