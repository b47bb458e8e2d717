"""Frames of a stream of completions: a template per request, into which each frame puts its text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.routes.completions.choices import Choice, ChoiceWriter
from dovetail.plugins.routes.completions.logprobs import TokenTexts
from dovetail.plugins.routes.completions.request import Asked
from dovetail.plugins.server.sampling import StreamOptions
from dovetail.plugins.server.sse import DONE, event
from dovetail.plugins.server.usage import usage


class FrameWriter:
    """Writes the frames of one request."""

    def __init__(self, head: dict[str, Any], asked: Asked, options: StreamOptions | None, token_texts: TokenTexts):
        """`head`: the fields that all frames have."""
        self._asked = asked
        self._token_texts = token_texts
        self._with_usage = bool(options is not None and options.include_usage)
        self._continuous = bool(options is not None and options.continuous_usage_stats)
        self._head = orjson.dumps(head)[:-1]  # without the brace that closes it
        self._is_plain = not (
            asked.with_logprobs or asked.with_token_ids or asked.with_accepted or asked.with_prompt_logprobs
        )
        self._before = b"data: " + self._head + b',"choices":[{"index":%d,"text":'
        ending = b',"usage":null}\n\n' if self._with_usage and not self._continuous else b"}\n\n"
        self._after = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + ending
        self._writers: dict[int, ChoiceWriter] = {}
        self._last: dict[int, RequestOutput] = {}
        self._num_output_tokens: dict[int, int] = {}
        """By prompt."""

    async def frames(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes, None]:
        """Whole events; what came in one output goes out at once."""
        async for prompt_index, output in outputs:
            self._last[prompt_index] = output
            written = b"".join([self._frame(prompt_index, output, completion) for completion in output.outputs])
            if written:
                yield written
        if self._with_usage:
            yield event(self._head + b',"choices":[],"usage":' + orjson.dumps(self._usage()) + b"}")
        yield DONE

    def _frame(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        index = prompt_index * self._asked.params.n + completion.index
        writer = self._writers.get(index)
        if writer is None:
            writer = self._writers[index] = ChoiceWriter(index, self._asked, self._token_texts)
        elif self._is_plain and completion.finish_reason is None and not self._continuous:
            self._count(prompt_index, len(completion.token_ids))
            if not completion.text:
                return b""
            return self._before % index + orjson.dumps(completion.text) + self._after
        choice = writer.write(output, completion)
        self._count(prompt_index, choice.num_tokens)
        return self._whole(choice)

    def _whole(self, choice: Choice) -> bytes:
        """A frame with all that it can have."""
        if self._is_plain and not choice.text and choice.finish_reason is None:
            return b""
        counts = b""
        if self._continuous:
            counts = b',"usage":' + orjson.dumps(self._usage())
        elif self._with_usage:
            counts = b',"usage":null'
        return event(self._head + b',"choices":[' + orjson.dumps(choice.as_data()) + b"]" + counts + b"}")

    def _count(self, prompt_index: int, num_tokens: int) -> None:
        self._num_output_tokens[prompt_index] = self._num_output_tokens.get(prompt_index, 0) + num_tokens

    def _usage(self) -> dict[str, Any]:
        return usage(
            sum(len(output.prompt_token_ids) for output in self._last.values()),
            sum(self._num_output_tokens.values()),
            sum(output.num_cached_tokens for output in self._last.values()),
        )
