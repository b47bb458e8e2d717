"""Sends requests to an engine, each at its time, and notes when each token comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dovetail import LLMEngine, RequestOutput, SamplingParams
from dovetail.contracts.errors import DovetailError


@dataclass(frozen=True)
class Clock:
    """Real time."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Finished:
    """One request's tokens, as they come."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    last: RequestOutput | None = None

    def take(self, output: RequestOutput, clock: float) -> None:
        """What one step brought. Raises `DovetailError` for a request that failed."""
        if output.error is not None:
            raise DovetailError(f"a request failed: {output.error}")
        for completion in output.outputs:
            self.token_ids += completion.token_ids
            self.times += [clock] * len(completion.token_ids)
        if output.finished:
            self.last = output


def serve(
    engine: LLMEngine,
    names: Sequence[str],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    arrivals: Sequence[float],
    clock: Clock,
) -> list[Finished]:
    """Sends each request at its arrival (seconds from now, in order) and steps the engine until all have finished.

    A request that arrives during a step is added after it, and its times count from when it arrived. While nothing is
    to be computed, the thread sleeps until the next arrival. Tokens' times count from the start. Raises `RequestError`
    for a request that is refused, before any is added, and `DovetailError` for one that fails; none is left in the
    engine then.
    """
    inputs = [engine.process_input(list(ids), own) for ids, own in zip(prompts, params, strict=True)]
    served = {name: Finished() for name in names}
    coming = deque(zip(arrivals, names, inputs, strict=True))
    added: list[str] = []
    start = clock.now()
    try:
        while coming or engine.has_unfinished_requests():
            while coming and coming[0][0] <= clock.now() - start:
                arrival, name, processed = coming.popleft()
                engine.add_request(name, processed, arrival_time=start + arrival)
                added.append(name)
            if not engine.has_unfinished_requests():
                clock.sleep(max(0.0, coming[0][0] - (clock.now() - start)))
                continue
            outputs = engine.step()
            passed = clock.now() - start
            for output in outputs:
                served[output.request_id].take(output, passed)
    except BaseException:
        engine.abort_request(added)
        raise
    return [served[name] for name in names]
