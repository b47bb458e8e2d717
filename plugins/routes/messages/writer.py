"""A completion as a message of Anthropic's: events of a stream, or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.routes.messages.shapes import block_data, event_data, stop_fields, usage_data
from dovetail.plugins.server.sse import named_event
from dovetail.plugins.server.turns.blocks import BlockEvent, Blocks
from dovetail.plugins.server.turns.reading import TurnReader


class MessageWriter:
    """Writes one message."""

    def __init__(self, message_id: str, model: str, reader: TurnReader):
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._reader = reader
        self._blocks = Blocks()

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The message."""
        (completion,) = output.outputs
        self._read(completion)
        return {
            **self._head,
            "content": [block_data(block) for block in self._blocks.blocks],
            **stop_fields(completion, self._blocks.blocks),
            "usage": usage_data(output, output.metrics.num_generated_tokens),
        }

    async def frames(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes, None]:
        """Whole events; what came in one output goes out at once."""
        begins, num_tokens = True, 0
        async for _, output in outputs:
            events = [self._start(output)] if begins else []
            begins = False
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
                events += [event_data(event) for event in self._read(completion)]
                if completion.finish_reason is not None:
                    ending = stop_fields(completion, self._blocks.blocks)
                    usage = usage_data(output, num_tokens)
                    events += [{"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]
            if events:
                yield b"".join(named_event(event["type"], orjson.dumps(event)) for event in events)

    def _start(self, output: RequestOutput) -> dict[str, Any]:
        ending = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **ending, "usage": usage_data(output, 0)}
        return {"type": "message_start", "message": message}

    def _read(self, completion: CompletionOutput) -> list[BlockEvent]:
        found = self._blocks.add(self._reader.read(completion))
        if completion.finish_reason is not None:
            found += self._blocks.finish(completion.finish_reason)
        return found
