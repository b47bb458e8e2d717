"""A completion as a response: whole, or as events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.plugins.routes.responses.items import begun_item, item_id, part_of, whole_item
from dovetail.plugins.routes.responses.logprobs import TokenReader
from dovetail.plugins.server.sse import named_event
from dovetail.plugins.server.turns.blocks import Block, BlockBegin, BlockDelta, BlockEvent, Blocks
from dovetail.plugins.server.turns.reading import TurnReader

_DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self,
        head: Mapping[str, Any],
        reader: TurnReader,
        tokens: TokenReader | None,
        count_tokens: Callable[[str], Awaitable[int]],
    ):
        """`head`: fields that the response has from the start, "id" among them. `tokens`: reads in place of `reader`
        where text comes with log probabilities. `count_tokens`: of a text."""
        self._head = head
        self._id: str = head["id"]
        self._reader = reader
        self._tokens = tokens
        self._logprobs: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        """By block."""
        self._blocks = Blocks()
        self._count_tokens = count_tokens
        self._num_events = 0

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response."""
        (completion,) = output.outputs
        for _ in self._read(completion):
            pass
        return await self._ended(completion, output, output.metrics.num_generated_tokens)

    async def frames(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]], ended: Callable[[dict[str, Any]], None]
    ) -> AsyncGenerator[bytes, None]:
        """Whole events; what came in one output goes out at once. `ended` gets the response before its end is sent."""
        begins, num_tokens = True, 0
        async for _, output in outputs:
            written: list[bytes] = []
            if begins:
                begins = False
                for name in ("created", "in_progress"):
                    written.append(self._event(f"response.{name}", response=self._begun()))
            for completion in output.outputs:
                num_tokens += len(completion.token_ids)
                for event, logprobs in self._read(completion):
                    written += self._events(event, logprobs)
                if completion.finish_reason is not None:
                    response = await self._ended(completion, output, num_tokens)
                    ended(response)
                    written.append(self._event(f"response.{response['status']}", response=response))
            if written:
                yield b"".join(written)

    def _read(self, completion: CompletionOutput) -> Iterator[tuple[BlockEvent, list[dict[str, Any]]]]:
        """What is new, with log probabilities where it is text."""
        if self._tokens is None:
            for found in self._blocks.add(self._reader.read(completion)):
                yield found, []
        else:
            for event, logprobs in self._tokens.read(completion):
                for found in self._blocks.add([event]):
                    if isinstance(found, BlockDelta):
                        self._logprobs[found.block.index] += logprobs
                    yield found, logprobs
        if completion.finish_reason is not None:
            for found in self._blocks.finish(completion.finish_reason):
                yield found, []

    def _events(self, event: BlockEvent, logprobs: list[dict[str, Any]]) -> list[bytes]:
        block = event.block
        if isinstance(event, BlockDelta):
            return [self._of_part(f"{_DELTAS[block.kind]}.delta", block, logprobs, delta=event.text)]
        if isinstance(event, BlockBegin):
            item = begun_item(self._id, block)
            added = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if block.kind != "call":
                added.append(self._of_part("response.content_part.added", block, part=part_of(block, "", [])))
            return added
        text = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
        logprobs = self._logprobs[block.index]
        done = [self._of_part(f"{_DELTAS[block.kind]}.done", block, logprobs, **text)]
        if block.kind != "call":
            part = part_of(block, block.text, logprobs)
            done.append(self._of_part("response.content_part.done", block, part=part))
        item = whole_item(self._id, block, logprobs)
        return [*done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _of_part(self, kind: str, block: Block, logprobs: Sequence[dict[str, Any]] = (), **fields: Any) -> bytes:
        place = {"item_id": item_id(self._id, block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if kind.startswith("response.output_text"):
            fields["logprobs"] = list(logprobs)
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"sequence_number": self._num_events, **fields, "type": kind}
        self._num_events += 1
        return named_event(kind, orjson.dumps(data))

    def _begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    async def _ended(self, completion: CompletionOutput, output: RequestOutput, num_tokens: int) -> dict[str, Any]:
        is_cut = completion.finish_reason == "length"
        thoughts = [block.text for block in self._blocks.blocks if block.kind == "reasoning"]
        num_reasoning_tokens = sum([await self._count_tokens(text) for text in thoughts])
        num_prompt_tokens = len(output.prompt_token_ids)
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [whole_item(self._id, block, self._logprobs[block.index]) for block in self._blocks.blocks],
            "usage": {
                "input_tokens": num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
                "output_tokens": num_tokens,
                "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
                "total_tokens": num_prompt_tokens + num_tokens,
            },
        }
