"""What replicas must have in common, and how one is brought there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.regions import RegionState
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.remote.client import RemoteEngine

_OWN_FACTS = {"num_workers", "kv_transfer_params"}
"""Fields of `EngineFacts` in which replicas may differ."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What calls to all replicas change."""

    weights: WeightsReport
    adapters: tuple[LoadedLoRA, ...]
    is_paused: bool
    asleep: Mapping[str, int]
    """Regions that sleep -> the level of their sleep."""
    invalid: str
    """Why weights are invalid; empty: none are."""

    def is_like(self, other: EngineState) -> bool:
        """Whether a replica in one of them needs nothing for the other: what requests change does not count."""
        mine, theirs = ({(one.name, one.digest, one.is_pinned) for one in each.adapters} for each in (self, other))
        return mine == theirs and replace(self, adapters=()) == replace(other, adapters=())


async def state_of(engine: RemoteEngine) -> EngineState:
    """The state of an engine now. Raises `WorkerError` where it ends meanwhile."""
    weights, adapters, is_paused, regions = await asyncio.gather(
        engine.weights(), engine.list_loras(), engine.is_paused(), engine.regions()
    )
    return EngineState(
        weights=weights,
        adapters=tuple(adapters),
        is_paused=is_paused,
        asleep={region.name: region.level for region in regions if region.state is RegionState.ASLEEP},
        invalid="; ".join(region.reason or region.name for region in regions if region.state is RegionState.INVALID),
    )


def difference(engine: RemoteEngine, other: RemoteEngine) -> str:
    """Why two engines would not give the same tokens, whatever calls they get; empty: they would."""
    mine, theirs = engine.facts, other.facts
    for field in fields(mine):
        name = field.name
        if name not in _OWN_FACTS and getattr(mine, name) != getattr(theirs, name):
            return f"its {name} is {getattr(mine, name)!r:.200}, and that of the others {getattr(theirs, name)!r:.200}"
    for name, value in engine.origin.identity.items():
        if value != other.origin.identity.get(name):
            return f"{name} differs from that of the others ({value} and {other.origin.identity.get(name)})"
    return ""


async def bring_to(engine: RemoteEngine, wanted: EngineState) -> str:
    """Gives an engine the adapters, the sleep and the pause of a state. Returns why it cannot have it; empty: it has.
    Raises what the engine raises."""
    mine = await state_of(engine)
    if mine.weights != wanted.weights:
        return (
            f"its weights have version {mine.weights.version}, and those of the others {wanted.weights.version}:"
            " update the weights of all again, or restart the server with a checkpoint of these"
        )
    if wanted.invalid or mine.invalid:
        return f"weights are invalid: {wanted.invalid or mine.invalid}"
    awake = [name for name, level in mine.asleep.items() if wanted.asleep.get(name) != level]
    if awake:
        await engine.wake_up(awake)
    await _bring_adapters(engine, mine.adapters, wanted.adapters)
    asleep = {name: level for name, level in wanted.asleep.items() if mine.asleep.get(name) != level}
    for level in sorted(set(asleep.values())):
        await engine.sleep(level, [name for name in asleep if asleep[name] == level])
    if wanted.is_paused and not mine.is_paused:
        await engine.pause("keep")
    elif mine.is_paused and not wanted.is_paused:
        await engine.resume()
    found = {(one.name, one.digest) for one in await engine.list_loras()}
    changed = [one.name for one in wanted.adapters if (one.name, one.digest) not in found]
    return f"the files of adapter {', '.join(changed)} changed since the others read them" if changed else ""


async def _bring_adapters(engine: RemoteEngine, mine: tuple[LoadedLoRA, ...], wanted: tuple[LoadedLoRA, ...]) -> None:
    has = {(one.name, one.digest): one for one in mine}
    keeps = {(one.name, one.digest) for one in wanted}
    for key in has.keys() - keeps:
        await engine.remove_lora(key[0])
    for one in wanted:  # before others are pinned: slots that may be pinned are few
        known = has.get((one.name, one.digest))
        if known is not None and known.is_pinned and not one.is_pinned:
            await engine.call("unpin_lora", adapter=one.name)
    for one in wanted:
        known = has.get((one.name, one.digest))
        if known is None:
            await engine.add_lora(LoRARequest(one.name, one.int_id, one.path))
        if one.is_pinned and (known is None or not known.is_pinned):
            await engine.pin_lora(one.name)
