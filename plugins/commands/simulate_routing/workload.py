"""The requests of a trace, with block hashes as an engine would make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from dovetail.commands.arrivals import BLOCK_TOKENS, TracedRequest

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One request of the trace."""

    request_id: str
    arrival: float
    """Seconds since the first request."""
    input_tokens: int
    output_tokens: int
    block_hashes: tuple[bytes, ...]
    """Of the prompt's full blocks; empty where the trace does not say which prompts are alike."""

    def num_blocks(self, block_size: int) -> int:
        """Blocks that its prompt and output fill; the last output token has no page."""
        return -(-(self.input_tokens + self.output_tokens - 1) // block_size)


def simulated_requests(trace: Sequence[TracedRequest]) -> list[SimulatedRequest]:
    """The trace's requests, with a chain of hashes over the ids of their full blocks."""
    return [
        SimulatedRequest(
            request_id=str(number),
            arrival=traced.arrival,
            input_tokens=traced.input_tokens,
            output_tokens=traced.output_tokens,
            block_hashes=_chain(traced.blocks[: traced.input_tokens // BLOCK_TOKENS]),
        )
        for number, traced in enumerate(trace)
    ]


def _chain(block_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Each hash covers a block's id and all before it, so that a block without its parents is of no use."""
    hashes: list[bytes] = []
    parent = b""
    for block in block_ids:
        parent = blake2b(parent + str(block).encode(), digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)
