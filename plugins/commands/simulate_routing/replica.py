"""One simulated replica: an engine's steps as a model of their cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dovetail.contracts.router import BlocksRemoved, BlocksStored, CacheEvent
from dovetail.plugins.commands.simulate_routing.cache import BlockCache
from dovetail.plugins.commands.simulate_routing.workload import SimulatedRequest


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What an engine's steps cost, and how much it holds."""

    prefill_rate: float
    """Prompt tokens per second."""
    decode_step: float
    """Seconds of a step in which requests generate one token each."""
    chunk_tokens: int
    """Most prompt tokens of one step."""
    max_running: int
    num_blocks: int
    block_size: int


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica."""

    request: SimulatedRequest
    num_computed: int = 0
    """Prompt tokens that are computed, or were found."""
    num_cached: int = 0
    left: int = 0
    """Output tokens that are still to come, the first one included."""
    contents: list[bytes] = field(default_factory=list)
    """Blocks with content that it holds."""
    num_plain: int = 0
    """Blocks without content that it holds."""


@dataclass(slots=True)
class StepEnd:
    """What the end of steps brought."""

    prefilled: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)


class SimulatedReplica:
    """Continuous batching with chunked prefill and a prefix cache.

    A step takes one token of each request that generates, and prompts in order of arrival, up to `chunk_tokens` of
    them. It lasts `decode_step` where something generates, and the time of its prompt tokens. A request is admitted
    when blocks for its prompt and all of its output are free, so nothing is preempted. Steps that only generate are
    simulated as one, which an arrival cuts at the end of the step that runs.
    """

    def __init__(self, costs: CostModel):
        self.busy_seconds = 0.0
        self._costs = costs
        self._cache = BlockCache(costs.num_blocks)
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._started = 0.0
        self._num_steps = 0
        self._ends: float | None = None

    @property
    def ends(self) -> float | None:
        """When the steps that run end; None where it is idle."""
        return self._ends

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests hold."""
        return 1.0 - self._cache.num_free / self._costs.num_blocks

    def add(self, request: SimulatedRequest, now: float) -> None:
        """A request arrives."""
        self._waiting.append(Job(request, left=request.output_tokens))
        if self._ends is not None and self._num_steps > 1:
            done = int((now - self._started) / self._costs.decode_step) + 1
            if done < self._num_steps:
                self._num_steps = done
                self._ends = self._started + done * self._costs.decode_step

    def start(self, now: float) -> list[CacheEvent]:
        """Begins steps where the replica is idle and has requests. Returns what was evicted for them."""
        if self._ends is not None:
            return []
        self._admit()
        budget = self._costs.chunk_tokens
        for job in self._prefilling:
            if job.num_computed == job.num_cached:
                self._find_more(job)
            count = min(budget, job.request.input_tokens - job.num_computed)
            if count == 0:
                break
            self._chunks.append((job, count))
            budget -= count
        if self._chunks or self._decoding:
            computed = self._costs.chunk_tokens - budget
            seconds = computed / self._costs.prefill_rate + (self._costs.decode_step if self._decoding else 0.0)
            self._num_steps = 1 if self._chunks else min(job.left for job in self._decoding)
            self._started, self._ends = now, now + self._num_steps * seconds
        evicted = self._cache.evicted()
        return [BlocksRemoved(block_hashes=evicted)] if evicted else []

    def end(self) -> StepEnd:
        """The steps that run are over."""
        assert self._ends is not None
        self.busy_seconds += self._ends - self._started
        result = StepEnd()
        for job in self._decoding:
            job.left -= self._num_steps
        for job, count in self._chunks:
            self._computed(job, count, result)
        self._chunks.clear()
        while self._prefilling and self._prefilling[0].num_computed == self._prefilling[0].request.input_tokens:
            job = self._prefilling.popleft()
            job.left -= 1
            self._decoding.append(job)
            result.prefilled.append(job)
        result.finished += [job for job in self._decoding if job.left <= 0]
        for job in result.finished:
            self._cache.free(job.contents, job.num_plain)
        self._decoding = [job for job in self._decoding if job.left > 0]
        self._ends = None
        return result

    def _admit(self) -> None:
        size = self._costs.block_size
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._costs.max_running:
            job = self._waiting[0]
            request = job.request
            num_blocks = request.num_blocks(size)
            run = self._cache.run(request.block_hashes, (request.input_tokens - 1) // size)
            found = request.block_hashes[:run]
            if not self._cache.take(found, num_blocks - run):
                return
            self._waiting.popleft()
            job.contents = list(found)
            job.num_plain = num_blocks - run
            job.num_computed = job.num_cached = run * size
            self._prefilling.append(job)

    def _find_more(self, job: Job) -> None:
        """Requests that arrive together compute a common prefix once: what others computed since the job was admitted
        takes the place of its empty blocks."""
        size, request = self._costs.block_size, job.request
        run = self._cache.run(request.block_hashes, (request.input_tokens - 1) // size)
        more = request.block_hashes[len(job.contents) : run]
        if more and self._cache.take(more, 0):
            self._cache.free((), len(more))
            job.contents += more
            job.num_plain -= len(more)
            job.num_computed = job.num_cached = run * size

    def _computed(self, job: Job, count: int, result: StepEnd) -> None:
        size, hashes = self._costs.block_size, job.request.block_hashes
        first = job.num_computed // size
        job.num_computed += count
        new = self._cache.register(hashes[first : job.num_computed // size])
        if new:
            job.contents += new
            job.num_plain -= len(new)
            parent = hashes[hashes.index(new[0]) - 1] if new[0] != hashes[0] else None
            event = BlocksStored(block_hashes=tuple(new), parent_hash=parent, token_ids=(), block_size=size)
            result.events.append(event)
