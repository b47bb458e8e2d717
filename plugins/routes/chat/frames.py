"""Frames of a stream of chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import orjson

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.routes.chat.choices import ChoiceWriter
from dovetail.plugins.routes.chat.request import Asked
from dovetail.plugins.server.sampling import StreamOptions
from dovetail.plugins.server.sse import DONE, event
from dovetail.plugins.server.usage import usage


class FrameWriter:
    """Writes the frames of one request."""

    def __init__(
        self,
        head: dict[str, Any],
        asked: Asked,
        options: StreamOptions | None,
        create_writer: Callable[[int], ChoiceWriter],
        first: Mapping[str, Any],
    ):
        """`head`: the fields that all frames have. `create_writer`: of a completion, by its index. `first`: further
        fields of the first frame, where it shows the prompt's token ids."""
        self._asked = asked
        self._create_writer = create_writer
        self._first = first
        self._with_usage = bool(options is not None and options.include_usage)
        self._continuous = bool(options is not None and options.continuous_usage_stats)
        self._head = orjson.dumps(head)[:-1]  # without the brace that closes it
        self._before = b"data: " + self._head + b',"choices":[{"index":%d,"delta":{"content":'
        ending = b',"usage":null}\n\n' if self._with_usage else b"}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null,"stop_reason":null}]' + ending
        self._is_plain = not (asked.with_logprobs or asked.with_token_ids or asked.with_accepted or self._continuous)
        self._writers: dict[int, ChoiceWriter] = {}
        self._num_output_tokens = 0
        self._last: RequestOutput | None = None

    async def frames(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes, None]:
        """Whole events; what came in one output goes out at once."""
        async for _, output in outputs:
            begins, self._last = self._last is None, output
            written = b"".join([self._frame(output, completion, begins) for completion in output.outputs])
            if written:
                yield written
        if self._with_usage:
            yield event(self._head + b',"choices":[],"usage":' + orjson.dumps(self._usage()) + b"}")
        yield DONE

    def _frame(self, output: RequestOutput, completion: CompletionOutput, begins: bool) -> bytes:
        """`begins`: whether it is the request's first output, which shows the prompt."""
        self._num_output_tokens += len(completion.token_ids)
        writer = self._writers.get(completion.index)
        if writer is None:
            writer = self._writers[completion.index] = self._create_writer(completion.index)
        choice = writer.delta(output, completion)
        delta = choice["delta"]
        if self._is_plain and choice["finish_reason"] is None:
            if not delta:
                return b""
            if len(delta) == 1 and "content" in delta:
                return self._before % completion.index + orjson.dumps(delta["content"]) + self._after
        return self._whole(choice, output if begins else None)

    def _whole(self, choice: dict[str, Any], first: RequestOutput | None) -> bytes:
        """A frame with all that it can have."""
        extras: dict[str, Any] = {}
        if self._asked.with_token_ids and first is not None:
            extras |= {"prompt_token_ids": first.prompt_token_ids, **self._first}
        if self._continuous:
            extras["usage"] = self._usage()
        elif self._with_usage:
            extras["usage"] = None
        more = b"," + orjson.dumps(extras)[1:-1] if extras else b""
        return event(self._head + b',"choices":[' + orjson.dumps(choice) + b"]" + more + b"}")

    def _usage(self) -> dict[str, Any]:
        assert self._last is not None
        counts = usage(len(self._last.prompt_token_ids), self._num_output_tokens, self._last.num_cached_tokens)
        return self._asked.usage(counts, self._last.metrics)
