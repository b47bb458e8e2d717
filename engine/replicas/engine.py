"""`ReplicatedEngine`: several engines of one config, each in a process of its own, as one `EngineClient`."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports
from dovetail.contracts.errors import RequestError, WorkerError
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
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.replicas.asking import ask
from dovetail.engine.replicas.exposition import labelled
from dovetail.engine.replicas.fleet import Fleet
from dovetail.engine.replicas.placing import PlacedRequest, Placing
from dovetail.engine.replicas.replica import Replica
from dovetail.engine.replicas.routing import Routing
from dovetail.engine.replicas.stream import RoutedStream
from dovetail.engine.replicas.updates import ReplicatedUpdates

logger = logging.getLogger(__name__)

RETRIES = 2
"""Times that a request goes to another replica where its own died before the first output."""


class ReplicatedEngine:
    """Requests from coroutines of one event loop to several engines. Make one with `connect`.

    A router chooses the replica of each request. Where a replica dies, requests of which nothing was read yet go to
    others; the rest fail with `WorkerError`, which names the replica. What changes engines (adapters, pauses, sleep,
    weights) is done by all replicas or by none; one that was gone meanwhile is brought to the state of the others, or
    takes no requests.
    """

    def __init__(self, fleet: Fleet, router: Router, retries: int = RETRIES):
        """`fleet`: not started yet. `retries`: see `RETRIES`."""
        self._fleet = fleet
        self._replicas = fleet.replicas
        self._routing = Routing(router, self._replicas)
        self._placing = Placing(self._replicas, self._routing, retries)
        self._name = uuid.uuid4().hex[:12]
        self._ids = itertools.count()
        self._updates = ReplicatedUpdates(fleet)
        self._digests: dict[str, str] = {}
        """Of adapters, by name."""
        self._pages: dict[Replica, Exposition] = {}
        """The metrics that each replica had last."""

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str],
        create_router: Callable[[RouterSetup], Router],
        *,
        retries: int = RETRIES,
        timeout_s: float | None = None,
    ) -> Self:
        """A client of the engines at `addresses`, once one of them answers; those that do not run yet are admitted when
        they come. Raises `WorkerError` where none answers within `timeout_s` seconds. An engine of another model or
        config takes no requests: the log names it."""
        fleet = Fleet(addresses)
        try:
            await fleet.wait_until_known(timeout_s)
            block_size = fleet.known.engine.facts.block_size
            setup = RouterSetup(num_replicas=len(addresses), block_size=block_size)
            engine = cls(fleet, create_router(setup), retries)
            await fleet.start(engine)
            await engine.list_loras()
        except BaseException:
            await fleet.close()
            raise
        return engine

    async def replica_admitted(self, replica: Replica) -> None:
        """See `FleetListener`."""
        self._routing.came_up(replica.index)  # before its blocks are reported: those of a lost replica are passed over
        if self._routing.follows_blocks:
            await replica.engine.follow_cache(partial(self._routing.cache_changed, replica.index))

    def replica_lost(self, replica: Replica) -> None:
        """See `FleetListener`."""
        self._routing.went_down(replica.index)

    def replica_silent(self, replica: Replica, error: WorkerError | None) -> None:
        """See `FleetListener`. Requests of which nothing was read move, if another replica can take them."""
        if error is not None and self.is_running:
            self._placing.interrupt(replica, error)

    @property
    def facts(self) -> EngineFacts:
        """See `EngineClient.facts`; those of each replica that takes requests."""
        return self._known.facts

    @property
    def is_running(self) -> bool:
        """Whether some replica takes requests."""
        return bool(self._fleet.admitted)

    @property
    def states(self) -> list[ReplicaState]:
        """The replicas, as the router sees them."""
        return self._routing.states

    @property
    def troubles(self) -> str:
        """Why replicas that take no requests do not, by name; empty: all do."""
        return self._fleet.troubles()

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
        self._placing.check_new(request_id)
        processed = replace(await self._any().process(prompt, sampling_params), lora_request=lora_request)
        num_prompt_tokens = len(processed.token_ids)
        routed = RoutedRequest(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max(0, processed.max_total_tokens - num_prompt_tokens),
            block_size=self.facts.block_size,
            block_hashes=self._hashes(processed, cache_salt),
        )
        fields = {"priority": priority, "cache_salt": cache_salt, "trace_headers": trace_headers, "user": user}
        return await self._placing.place(PlacedRequest(routed, processed, fields))

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
        await self._placing.abort(request_id)

    # What no engine need take part in.

    async def plan_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestPlan:
        """See `EngineClient.plan_request`."""
        return await self._any().plan_request(prompt, sampling_params)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._known.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        return await self._known.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        return await self._known.pair_prompt(first, second, truncate_prompt_tokens=truncate_prompt_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        return await self._known.render_chat(messages, **options)

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        return self._known.token_texts(token_ids)

    # What all of them are asked.

    async def explain_request(self, request_id: str) -> RequestReports:
        """See `EngineClient.explain_request`; of all replicas that run, in their order."""
        reports = (await self._fleet.read(lambda engine: engine.explain_request(request_id))).done.values()
        return RequestReports(
            requests=tuple(request for report in reports for request in report.requests),
            num_kept=sum(report.num_kept for report in reports),
        )

    async def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `EngineClient.add_lora`. Where one replica refuses, the others unload the adapter again."""
        loaded: LoadedLoRA = (await self._fleet.on_all(lambda engine: engine.add_lora(request))).first
        self._digests[loaded.name] = loaded.digest
        return loaded

    async def remove_lora(self, adapter: str | int) -> None:
        """See `EngineClient.remove_lora`. While requests of one replica use it, all have it still."""
        await self._fleet.on_all(lambda engine: engine.remove_lora(adapter))

    async def list_loras(self) -> list[LoadedLoRA]:
        """See `EngineClient.list_loras`. Requests are counted over all replicas."""
        lists = list((await self._fleet.read(RemoteEngine.list_loras)).done.values())
        counts: dict[str, int] = {}
        for lora in (lora for loras in lists for lora in loras):
            counts[lora.name] = counts.get(lora.name, 0) + lora.num_requests
        self._digests = {lora.name: lora.digest for lora in lists[0]}
        return [replace(lora, num_requests=counts[lora.name]) for lora in lists[0]]

    async def pin_lora(self, adapter: str | int) -> None:
        """See `EngineClient.pin_lora`. Where one replica refuses, it is pinned on none."""
        await self._fleet.on_all(lambda engine: engine.pin_lora(adapter))

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets the cached prefixes of all replicas; the blocks of all together."""
        resets = (await self._fleet.on_all(RemoteEngine.reset_prefix_cache)).done.values()
        return PrefixCacheReset(sum(one.num_dropped for one in resets), sum(one.num_in_use for one in resets))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `EngineClient.pause`."""
        await self._fleet.on_all_at_length(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """See `EngineClient.resume`."""
        await self._fleet.on_all(RemoteEngine.resume)

    async def is_paused(self) -> bool:
        """See `EngineClient.is_paused`."""
        return any((await self._fleet.read(RemoteEngine.is_paused)).done.values())

    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """See `EngineClient.sleep`; the bytes of all replicas."""
        return sum((await self._fleet.on_all(lambda engine: engine.sleep(level, tags))).done.values())

    async def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `EngineClient.wake_up`."""
        await self._fleet.on_all(
            lambda engine: engine.wake_up(tags, new_weights=new_weights, for_update=for_update),
        )

    async def regions(self) -> tuple[RegionStatus, ...]:
        """See `EngineClient.regions`; of each replica, in their order."""
        found = (await self._fleet.read(RemoteEngine.regions)).done.values()
        return tuple(status for statuses in found for status in statuses)

    async def is_sleeping(self) -> bool:
        """See `EngineClient.is_sleeping`."""
        return any((await self._fleet.read(RemoteEngine.is_sleeping)).done.values())

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """See `EngineClient.init_weight_transfer_engine`. Raises `RequestError` for a transport that connects: each
        replica would need a connection of its own."""
        if init_info:
            raise RequestError(
                f"{len(self._replicas)} replicas cannot share one connection of a weight transport: use the transport"
                " disk, whose init_info is empty, or update engines that are served one by one"
            )
        await self._updates.init({})

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `EngineClient.start_weight_update` and `ReplicatedUpdates`."""
        return await self._updates.start(is_checkpoint_format, weight_version, partial)

    async def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `EngineClient.update_weights`. Where some replicas receive the bucket and others refuse it, the update is
        ended on all."""
        await self._updates.receive(update_info, drafter)

    async def finish_weight_update(self) -> WeightsReport:
        """See `EngineClient.finish_weight_update`. A replica that fails where others do not takes no requests before it
        has the weights of the others; the error names it."""
        return await self._updates.finish()

    async def abort_weight_update(self) -> None:
        """See `EngineClient.abort_weight_update`."""
        await self._updates.abort()

    async def weights(self) -> WeightsReport:
        """See `EngineClient.weights`."""
        report: WeightsReport = (await self._fleet.read(RemoteEngine.weights)).first
        return report

    async def metrics(self) -> Exposition:
        """See `EngineClient.metrics`; each sample has the label `engine`, the index of its replica. A replica that runs
        and does not answer has the samples that it had last, so that sums do not fall; `dovetail:replica_up` has a
        sample for each, also where none answers."""
        answers = await ask([one for one in self._replicas if one.is_reachable], RemoteEngine.metrics)
        if answers.failed and not answers.done:
            raise answers.error()
        silent = {one: page for one, page in self._pages.items() if one.engine.is_running and not one.is_reachable}
        self._pages = {**silent, **answers.done}
        return labelled(
            {replica.index: self._pages[replica] for replica in self._replicas if replica in self._pages},
            {replica.index: replica.trouble for replica in self._replicas},
        )

    async def check_health(self) -> None:
        """Returns where some replica that takes requests answers; raises `WorkerError` with what ails each of them."""
        answers = await ask(self._fleet.some(), RemoteEngine.check_health)
        if not answers.done:
            raise WorkerError(
                "no replica answers: "
                + "; ".join(f"{one.name}: {error}" for one, error in {**answers.failed, **answers.gone}.items())
            )

    async def close(self) -> None:
        """Ends the clients of all replicas. Idempotent."""
        await self._fleet.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _any(self) -> RemoteEngine:
        """One that takes requests. Raises `WorkerError` where none does."""
        return self._fleet.some()[0].engine

    @property
    def _known(self) -> RemoteEngine:
        """One that has facts and a tokenizer; if any runs, one that does."""
        admitted = self._fleet.admitted
        return admitted[0].engine if admitted else self._fleet.known.engine

    def _hashes(self, processed: ProcessedInput, cache_salt: str | None) -> tuple[bytes, ...]:
        """Of the prompt's full blocks; none where the router does not ask, or the prefix cache is not used."""
        params, lora = processed.params, processed.lora_request
        facts = self._known.prefix
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
