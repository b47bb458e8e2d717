"""When one request's tokens came, and what is computed from that. The terms are defined in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class RequestTimes:
    """One request. Times are seconds from the start of its run."""

    workload: str
    repetition: int
    arrival: float
    sent: float
    """When the request was handed to the engine: later than `arrival` where it waited under the concurrency cap."""
    scheduled: float | None
    """When the engine first scheduled the request."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    tokens: Sequence[float]
    """Arrival of each output token; at least one. Of a server that does not say how many tokens a chunk of its stream
    has, the arrival of each chunk."""
    counted_tokens: int | None = None
    """Output tokens by the server's own count, where `tokens` has chunks."""

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return len(self.tokens) if self.counted_tokens is None else self.counted_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first token (TTFT)."""
        return self.tokens[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies (ITL) in seconds."""
        return [later - earlier for earlier, later in pairwise(self.tokens)]

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the last token."""
        return self.tokens[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def queued(self) -> float | None:
        """Seconds from arrival to the first scheduled step."""
        return None if self.scheduled is None else self.scheduled - self.arrival


def prefill_rate(requests: Sequence[RequestTimes]) -> float:
    """Prompt tokens of a batch over the time until its last request has its first token."""
    seconds = max(request.tokens[0] for request in requests) - min(request.arrival for request in requests)
    return sum(request.prompt_tokens for request in requests) / seconds


def decode_rate(requests: Sequence[RequestTimes]) -> float | None:
    """Tokens that come once every request of a batch has its first one, over the time that they take; None if none."""
    begin = max(request.tokens[0] for request in requests)
    end = max(request.tokens[-1] for request in requests)
    later = sum(time > begin for request in requests for time in request.tokens)
    return later / (end - begin) if later else None
