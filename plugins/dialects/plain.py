"""Text as it is: for models that neither call tools nor reason."""

from __future__ import annotations

from typing import ClassVar

from dovetail.contracts.dialect import (
    AssistantMessage,
    Dialect,
    DialectCapabilities,
    DialectParser,
    DialectRequest,
)
from dovetail.contracts.errors import RequestError
from dovetail.plugins.dialects.parsing import TextParser


class PlainDialect(Dialect):
    """No calls and no reasoning: all is content."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DialectCapabilities(grammars=True)
    preference = -10

    def parser(self, request: DialectRequest) -> DialectParser:
        """See `Dialect.parser`."""
        return TextParser(request, None, None)

    def grammar(self, request: DialectRequest) -> str | None:
        """See `Dialect.grammar`."""
        return None if request.response_format is None else f"start: {request.response_format}\n"

    def render_message(self, message: AssistantMessage) -> str:
        """See `Dialect.render_message`. Raises `RequestError` for messages with calls or reasoning."""
        if message.calls or message.reasoning:
            raise RequestError("dialect plain writes neither calls nor reasoning: choose another dialect")
        return message.content
