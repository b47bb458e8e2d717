"""`ReplicatedEngine`: several engines of one config, each in a process of its own, as one `EngineClient`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports
from dovetail.contracts.errors import DovetailError, QueueFull, RequestError, WorkerError
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.router import ReplicaState, RoutedRequest, Router, RouterSetup
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import Exposition
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.output_stream import OutputReader
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.prefix_facts import PrefixFacts
from dovetail.engine.replicas.exposition import labelled
from dovetail.engine.replicas.routing import Routing
from dovetail.engine.replicas.silence import watch_answers
from dovetail.engine.replicas.stream import RoutedStream

logger = logging.getLogger(__name__)

RETRIES = 2
"""Times that a request goes to another replica where its own died before the first output."""
Answer = TypeVar("Answer")


class ReplicatedEngine:
    """Requests from coroutines of one event loop to several engines. Make one with `connect`.

    A router chooses the replica of each request. Where a replica dies, requests of which nothing was read yet go to
    others; the rest fail with `WorkerError`, which names the replica. A replica that comes back is brought to the
    state of the others: the adapters that were loaded meanwhile, and a pause. What changes engines (adapters, pauses,
    sleep, weights) is asked of all that run, at once.
    """

    def __init__(self, replicas: Sequence[RemoteEngine], router: Router, retries: int = RETRIES):
        """`replicas`: connected. `retries`: see `RETRIES`."""
        self._replicas = list(replicas)
        self._names = [f"replica {index}" for index in range(len(self._replicas))]
        self._routing = Routing(router, self._names)
        self._retries = retries
        self._name = uuid.uuid4().hex[:12]
        self._ids = itertools.count()
        self._requests: dict[str, _Placed] = {}
        """By request id, of those that have not ended."""
        self._adapters: dict[str, LoRARequest] = {}
        """Those that were loaded since the start, by name."""
        self._pause: PauseMode | None = None
        self._weights: WeightsReport | None = None
        """Of the last update; None before the first."""
        self._facts: PrefixFacts | None = None
        """What the hashes of prompts' blocks follow from; None where the router does not follow blocks."""
        self._digests: dict[str, str] = {}
        """Of adapters, by name."""
        for index in range(len(self._replicas)):
            self._routing.came_up(index)
        self._watches = [asyncio.create_task(self._watch(index)) for index in range(len(self._replicas))]
        for index, replica in enumerate(self._replicas):
            requests = partial(self._routing.requests_of, index)
            self._watches.append(
                asyncio.create_task(watch_answers(replica, requests, partial(self._note_silence, index)))
            )

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str],
        create_router: Callable[[RouterSetup], Router],
        *,
        retries: int = RETRIES,
        timeout_s: float | None = None,
    ) -> Self:
        """A client of the engines at `addresses`, once all of them answer. Raises `WorkerError` where one does not
        within `timeout_s` seconds."""
        replicas = await asyncio.gather(*(RemoteEngine.connect(address, timeout_s) for address in addresses))
        setup = RouterSetup(num_replicas=len(replicas), block_size=replicas[0].facts.block_size)
        engine = cls(replicas, create_router(setup), retries)
        try:
            for index in range(len(replicas)):
                await engine._follow_cache(index)
            await engine.list_loras()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def facts(self) -> EngineFacts:
        """See `EngineClient.facts`; those of each replica."""
        return self._replicas[0].facts

    @property
    def is_running(self) -> bool:
        """Whether some replica takes requests."""
        return any(state.is_up for state in self._routing.states)

    @property
    def states(self) -> list[ReplicaState]:
        """The replicas, as the router sees them."""
        return self._routing.states

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RoutedStream:
        """See `EngineClient.submit`. Raises `WorkerError` where no replica is up, `QueueFull` where all that are up
        refuse the request for now."""
        request_id = request_id if request_id is not None else f"{self._name}-{next(self._ids)}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        processed = replace(await self._any().process(prompt, sampling_params), lora_request=lora_request)
        fields = {"priority": priority, "cache_salt": cache_salt, "trace_headers": trace_headers, "user": user}
        hashes = self._hashes(processed, cache_salt)
        placed = self._requests[request_id] = _Placed(request_id, processed, fields, self.facts.block_size, hashes)
        try:
            replica, stream = await self._place(placed)
        except BaseException:
            self.note_end(request_id)
            raise
        placed.stream = RoutedStream(request_id, replica, stream, self)
        return placed.stream

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As `AsyncLLMEngine.generate`. `options`: as of `submit`."""
        stream = await self.submit(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        placed = self._requests.get(request_id)
        if placed is not None and placed.replica is not None:
            await self._replicas[placed.replica].abort(request_id)

    # What `RoutedStream` asks.

    async def place_again(self, stream: RoutedStream, error: WorkerError) -> tuple[int, OutputReader]:
        """See `Mover.place_again`."""
        placed = self._requests[stream.request_id]
        if stream.num_moves >= self._retries:
            raise self.lost(stream, error) from error
        logger.warning(
            "request %s goes to another replica, since %s failed before its first output: %s",
            stream.request_id,
            self._names[stream.replica],
            error,
        )
        return await self._place(placed, {self._leave(placed)})

    def note_output(self, request_id: str) -> None:
        """See `Mover.note_output`."""
        self._routing.prefilled(request_id)

    def note_end(self, request_id: str) -> None:
        """See `Mover.note_end`."""
        self._requests.pop(request_id, None)
        self._routing.finished(request_id)

    def lost(self, stream: RoutedStream, error: WorkerError) -> WorkerError:
        """See `Mover.lost`."""
        name = self._names[stream.replica]
        if stream.has_output:
            why = "it had sent output already, so the request was not retried on another replica"
        else:
            why = f"it was retried {stream.num_moves} times before (server.retries)"
        return WorkerError(f"{name} failed while it had request {stream.request_id}: {error}; {why}")

    async def _place(self, placed: _Placed, excluded: Collection[int] = ()) -> tuple[int, OutputReader]:
        """Asks replicas in the router's order until one has the request."""
        refused = set(excluded)
        last: DovetailError | None = None
        while True:
            self._note_deaths()
            try:
                placed.replica = index = self._routing.place(placed.routed, refused)
            except WorkerError as error:
                # A replica that is full is no failure: its refusal says when to come again.
                raise last if last is not None else error from None
            try:
                stream = await self._replicas[index].submit_processed(
                    placed.processed, placed.routed.request_id, **placed.fields
                )
            except (QueueFull, WorkerError) as error:
                last = error if isinstance(error, QueueFull) or last is None else last
                refused.add(self._leave(placed))
            else:
                return index, stream

    def _leave(self, placed: _Placed) -> int:
        """The request is at no replica; which one had it."""
        index = placed.replica
        assert index is not None
        self._note_deaths()
        self._routing.finished(placed.routed.request_id)
        placed.replica = None
        return index

    # What no engine need take part in.

    async def plan_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestPlan:
        """See `EngineClient.plan_request`."""
        return await self._any().plan_request(prompt, sampling_params)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._replicas[0].tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        return await self._replicas[0].detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        return await self._replicas[0].pair_prompt(first, second, truncate_prompt_tokens=truncate_prompt_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        return await self._replicas[0].render_chat(messages, **options)

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        return self._replicas[0].token_texts(token_ids)

    # What all of them are asked.

    async def explain_request(self, request_id: str) -> RequestReports:
        """See `EngineClient.explain_request`; of all replicas that run, in their order."""
        reports = await self._all(lambda replica: replica.explain_request(request_id))
        return RequestReports(
            requests=tuple(request for report in reports for request in report.requests),
            num_kept=sum(report.num_kept for report in reports),
        )

    async def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `EngineClient.add_lora`. Where one replica refuses, the others unload the adapter again."""
        before = {lora.name for lora in await self.list_loras()}
        running = self._running()
        results = await asyncio.gather(*(replica.add_lora(request) for replica in running), return_exceptions=True)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if failed is None:
            self._adapters[request.lora_name] = request
            await self.list_loras()
            return next(result for result in results if isinstance(result, LoadedLoRA))
        if request.lora_name not in before:
            for replica, result in zip(running, results, strict=True):
                if isinstance(result, LoadedLoRA):
                    with suppress(DovetailError):
                        await replica.remove_lora(request.lora_name)
        raise failed

    async def remove_lora(self, adapter: str | int) -> None:
        """See `EngineClient.remove_lora`."""
        names = {lora.name for lora in await self.list_loras() if adapter in (lora.name, lora.int_id)}
        await self._all(lambda replica: replica.remove_lora(adapter))
        for name in names:
            self._adapters.pop(name, None)

    async def list_loras(self) -> list[LoadedLoRA]:
        """See `EngineClient.list_loras`."""
        loras = await self._any().list_loras()
        self._digests = {lora.name: lora.digest for lora in loras}
        return loras

    async def pin_lora(self, adapter: str | int) -> None:
        """See `EngineClient.pin_lora`."""
        await self._all(lambda replica: replica.pin_lora(adapter))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `EngineClient.pause`."""
        await self._all(lambda replica: replica.pause(mode))
        self._pause = mode

    async def resume(self) -> None:
        """See `EngineClient.resume`."""
        await self._all(lambda replica: replica.resume())
        self._pause = None

    async def is_paused(self) -> bool:
        """See `EngineClient.is_paused`."""
        return any(await self._all(lambda replica: replica.is_paused()))

    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """See `EngineClient.sleep`; the bytes of all replicas."""
        return sum(await self._all(lambda replica: replica.sleep(level, tags)))

    async def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `EngineClient.wake_up`."""
        await self._all(lambda replica: replica.wake_up(tags, new_weights=new_weights, for_update=for_update))

    async def regions(self) -> tuple[RegionStatus, ...]:
        """See `EngineClient.regions`; of each replica, in their order."""
        found = await self._all(lambda replica: replica.regions())
        return tuple(status for statuses in found for status in statuses)

    async def is_sleeping(self) -> bool:
        """See `EngineClient.is_sleeping`."""
        return any(await self._all(lambda replica: replica.is_sleeping()))

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """See `EngineClient.init_weight_transfer_engine`. Raises `RequestError` for a transport that connects: each
        replica would need a connection of its own."""
        if init_info:
            raise RequestError(
                f"{len(self._replicas)} replicas cannot share one connection of a weight transport: use the transport"
                " disk, whose init_info is empty, or update engines that are served one by one"
            )
        await self._everyone(lambda replica: replica.init_weight_transfer_engine(init_info))

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `EngineClient.start_weight_update`. Raises `WorkerError` while a replica is down."""
        versions = await self._everyone(
            lambda replica: replica.start_weight_update(
                is_checkpoint_format, weight_version=weight_version, partial=partial
            )
        )
        return max(versions)

    async def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `EngineClient.update_weights`."""
        await self._everyone(lambda replica: replica.update_weights(update_info, drafter=drafter))

    async def finish_weight_update(self) -> WeightsReport:
        """See `EngineClient.finish_weight_update`. A replica that comes back later has the checkpoint's weights: it
        takes no requests."""
        self._weights = (await self._everyone(lambda replica: replica.finish_weight_update()))[0]
        for index in range(len(self._replicas)):
            await self._follow_cache(index)  # hashes follow from the weights
        return self._weights

    async def abort_weight_update(self) -> None:
        """See `EngineClient.abort_weight_update`."""
        await self._all(lambda replica: replica.abort_weight_update())

    async def weights(self) -> WeightsReport:
        """See `EngineClient.weights`."""
        return await self._any().weights()

    async def metrics(self) -> Exposition:
        """See `EngineClient.metrics`; each sample has the label `engine`, the index of its replica. Those of replicas
        that do not answer are left out."""
        self._running()
        asked = [index for index, state in enumerate(self._routing.states) if state.is_up]
        pages = await asyncio.gather(*(self._replicas[index].metrics() for index in asked), return_exceptions=True)
        found = {index: page for index, page in zip(asked, pages, strict=True) if isinstance(page, Exposition)}
        if not found:
            raise next((page for page in pages if isinstance(page, BaseException)), WorkerError("no replica answers"))
        return labelled(found)

    async def check_health(self) -> None:
        """Returns where some replica answers; raises `WorkerError` with what ails each of them."""
        self._running()
        answers = await asyncio.gather(
            *(replica.check_health() for replica in self._replicas if replica.is_running), return_exceptions=True
        )
        if all(isinstance(answer, BaseException) for answer in answers):
            raise WorkerError("no replica answers: " + "; ".join(map(str, answers)))

    async def close(self) -> None:
        """Ends the clients of all replicas. Idempotent."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _any(self) -> RemoteEngine:
        """One that runs, and answers if any does."""
        running = self._running()
        up = (replica for replica, state in zip(self._replicas, self._routing.states, strict=True) if state.is_up)
        return next(up, running[0])

    def _running(self) -> list[RemoteEngine]:
        """Raises `WorkerError` where there is none."""
        running = [replica for replica in self._replicas if replica.is_running]
        if not running:
            raise WorkerError(f"none of {len(self._replicas)} replicas is running")
        return running

    async def _all(self, ask: Callable[[RemoteEngine], Any]) -> list[Any]:
        """The answers of all that run. Each of them is asked, whatever others answer; the first error is raised."""
        answers = await asyncio.gather(*map(ask, self._running()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def _everyone(self, ask: Callable[[RemoteEngine], Any]) -> list[Any]:
        """As `_all`, where none may be left out."""
        down = [self._names[index] for index, replica in enumerate(self._replicas) if not replica.is_running]
        if down:
            raise WorkerError(f"{', '.join(down)} is not running, and weights are replaced on all replicas or on none")
        return await self._all(ask)

    def _note_deaths(self) -> None:
        """The router hears of a death before it is asked again."""
        for index, replica in enumerate(self._replicas):
            if not replica.is_running:
                self._routing.went_down(index)

    def _note_silence(self, index: int, error: WorkerError | None) -> None:
        """A replica does not answer: it gets no requests, and those of which nothing was read move, if another replica
        can take them. None: it answers again."""
        self._routing.set_silent(index, error is not None)
        name = self._names[index]
        if error is None:
            logger.info("%s answers again", name)
            return
        logger.error("%s does not answer: %s", name, error)
        if not self.is_running:
            return
        for request_id in self._routing.requests_of(index):
            stream = self._requests[request_id].stream
            if stream is not None and not stream.has_output and stream.num_moves < self._retries:
                stream.interrupt(error)

    async def _watch(self, index: int) -> None:
        replica = self._replicas[index]
        while True:
            await replica.wait_until_down()
            self._routing.went_down(index)
            logger.error("%s is down: requests go to the others", self._names[index])
            await replica.wait_until_running()
            try:
                await self._bring_up(index)
                self._routing.came_up(index)  # before its blocks are reported: those of a lost replica are passed over
                await self._follow_cache(index)
            except DovetailError as error:
                logger.error("%s is back and takes no requests: %s", self._names[index], error)
                continue
            logger.info("%s takes requests again", self._names[index])

    async def _follow_cache(self, index: int) -> None:
        """The router hears what a replica's prefix cache has, from now on; one that does not follow blocks does not."""
        if self._routing.follows_blocks:
            report = partial(self._routing.cache_changed, index)
            self._facts = await self._replicas[index].follow_cache(report)

    def _hashes(self, processed: ProcessedInput, cache_salt: str | None) -> tuple[bytes, ...]:
        """Of the prompt's full blocks; none where the router does not ask, or the prefix cache is not used."""
        params, lora = processed.params, processed.lora_request
        facts = self._facts
        if facts is None or not self.facts.prefix_caching or processed.needs_every_state:
            return ()
        if params.prompt_logprobs is not None or (lora is not None and lora.lora_name not in self._digests):
            return ()
        return facts.block_hashes(
            processed.token_ids,
            self.facts.block_size,
            adapter=None if lora is None else self._digests[lora.lora_name],
            salt=processed.cache_salt if processed.cache_salt is not None else cache_salt,
            drafter=processed.drafter,
        )

    async def _bring_up(self, index: int) -> None:
        """A new engine, in the state of the others. Raises `DovetailError` where that cannot be."""
        replica = self._replicas[index]
        if self._weights is not None and (found := await replica.weights()) != self._weights:
            raise WorkerError(
                f"its weights have version {found.version}, and those of the others {self._weights.version}: restart"
                " the server, or update the weights of all again once they run"
            )
        for request in self._adapters.values():
            await replica.add_lora(request)
        if self._pause is not None:
            await replica.pause(self._pause)


class _Placed:
    """One request that has not ended."""

    def __init__(
        self,
        request_id: str,
        processed: ProcessedInput,
        fields: dict[str, Any],
        block_size: int,
        block_hashes: tuple[bytes, ...],
    ):
        """`fields`: the other arguments of `RemoteEngine.submit_processed`."""
        self.processed = processed
        self.fields = fields
        self.replica: int | None = None
        self.stream: RoutedStream | None = None
        """None until a replica has it."""
        num_prompt_tokens = len(processed.token_ids)
        self.routed = RoutedRequest(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max(0, processed.max_total_tokens - num_prompt_tokens),
            block_size=block_size,
            block_hashes=block_hashes,
        )
