"""One completion as a choice: what is new of it, with the prompt before it where that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.routes.completions.logprobs import LogprobLists, TokenTexts, prompt_logprobs
from dovetail.plugins.routes.completions.request import Asked
from dovetail.plugins.server.accepted import accepted_fields


@dataclass(frozen=True, slots=True)
class Choice:
    """What one frame, or the whole response, says of a completion."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    extras: dict[str, Any]
    """Further fields, of vLLM's and our own."""
    num_tokens: int
    """Output tokens that are shown."""

    def as_data(self) -> dict[str, Any]:
        """As clients read it."""
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            **self.extras,
        }


class ChoiceWriter:
    """Follows one completion."""

    def __init__(self, index: int, asked: Asked, token_texts: TokenTexts):
        self._index = index
        self._asked = asked
        self._token_texts = token_texts
        self._is_first = True
        self._lists = LogprobLists(token_texts, as_ids=asked.tokens_as_ids) if asked.with_logprobs else None

    def write(self, output: RequestOutput, completion: CompletionOutput) -> Choice:
        """What is new. The prompt and what is known of it come first, once."""
        asked, begins = self._asked, self._is_first
        self._is_first = False
        text, ids, positions = completion.text, completion.token_ids, list(completion.logprobs or ())
        if asked.scores_only:
            text, ids, positions = "", [], []
        num_tokens, extras = len(ids), self._extras(output, completion, ids, begins)
        shown_ids, shown = ids, list[Any](positions)
        if begins and asked.echo:
            text = (output.prompt or "") + text
            shown_ids = [*output.prompt_token_ids, *ids]
            shown = [*(output.prompt_logprobs or ()), *positions]
        return Choice(
            index=self._index,
            text=text,
            finish_reason="length" if asked.scores_only and completion.finished else completion.finish_reason,
            stop_reason=completion.stop_reason,
            logprobs=self._lists.add(text, shown_ids, shown) if self._lists is not None else None,
            extras=extras,
            num_tokens=num_tokens,
        )

    def _extras(
        self, output: RequestOutput, completion: CompletionOutput, ids: list[int], begins: bool
    ) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._asked.with_token_ids:
            extras["token_ids"] = ids
            if begins:
                extras["prompt_token_ids"] = output.prompt_token_ids
        if self._asked.with_accepted:
            extras |= accepted_fields(output, completion, self._token_texts)
            if self._asked.scores_only:
                extras["tokens"] = []
        if self._asked.with_prompt_logprobs and begins:
            extras["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return extras
