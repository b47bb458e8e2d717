"""One completion as a choice."""

from __future__ import annotations

from typing import Any

from dovetail.contracts.dialect import Dialect, DialectRequest, message_of
from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.routes.chat.deltas import delta_of, message_data
from dovetail.plugins.routes.chat.logprobs import chat_logprobs
from dovetail.plugins.routes.chat.request import Asked
from dovetail.plugins.routes.completions.logprobs import TokenTexts
from dovetail.plugins.server.accepted import accepted_fields
from dovetail.plugins.server.turns.reading import TurnReader


class ChoiceWriter:
    """Follows one completion."""

    def __init__(self, index: int, asked: Asked, dialect: Dialect, request: DialectRequest, token_texts: TokenTexts):
        self._index = index
        self._asked = asked
        self._token_texts = token_texts
        self._reader = TurnReader(dialect, request, shows_reasoning=asked.shows_reasoning)
        self._begins = True

    def delta(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """What is new; `delta` is empty where that is nothing."""
        delta = delta_of(self._reader.read(completion))
        if self._begins:
            self._begins = False
            delta = {"role": "assistant", **delta, "content": self._asked.echo + delta.get("content", "")}
        return self._choice("delta", delta, output, completion)

    def whole(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """All of it."""
        message = message_of(self._reader.read(completion))
        return self._choice("message", message_data(message, self._asked.echo), output, completion)

    def _choice(
        self, name: str, said: dict[str, Any], output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        asked = self._asked
        logprobs = None
        if asked.with_logprobs:
            logprobs = chat_logprobs(
                completion.token_ids,
                completion.logprobs or (),
                asked.params.logprobs or 0,
                self._token_texts,
                as_ids=asked.tokens_as_ids,
            )
        choice: dict[str, Any] = {
            "index": self._index,
            name: said,
            "logprobs": logprobs,
            "finish_reason": self._reader.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if asked.with_token_ids:
            choice["token_ids"] = completion.token_ids
        if asked.with_accepted:
            choice |= accepted_fields(output, completion, self._token_texts)
        return choice
