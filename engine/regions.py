"""The states of an engine's regions, and which transitions are legal. It moves no memory: whoever does asks first, and
notes it afterwards, so that what is refused or fails changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum

from dovetail.contracts.errors import RequestError
from dovetail.contracts.pausing import EngineConflict, check_level
from dovetail.contracts.regions import (
    DRAFTER_PREFIX,
    KV_CACHE,
    WEIGHTS,
    RegionState,
    RegionStatus,
    drafter_region,
)

_DISCARDED = "they were discarded by sleep level 2, and wait for an update"
_RESIDENT, _ASLEEP, _INVALID = RegionState.RESIDENT, RegionState.ASLEEP, RegionState.INVALID


class Change(Enum):
    """What happens to one region."""

    SLEEP = "sleep"
    WAKE = "wake_up"
    """With its content."""
    TAKE_MEMORY = "wake_up without weights"
    """It has its memory again, and waits for content."""
    INVALIDATE = "invalidate"
    """An update of it failed while it was written."""
    RESTORE = "restore"
    """All of it was updated."""


_LEGAL: Mapping[tuple[RegionState, Change], RegionState] = {
    (_RESIDENT, Change.SLEEP): _ASLEEP,
    (_RESIDENT, Change.INVALIDATE): _INVALID,
    (_ASLEEP, Change.WAKE): _RESIDENT,
    (_ASLEEP, Change.TAKE_MEMORY): _INVALID,
    (_INVALID, Change.RESTORE): _RESIDENT,
}
"""Besides: `WEIGHTS` that are invalid may sleep at level 2, since waking up reads them again; `KV_CACHE` is never
invalid, wakes up only where `WEIGHTS` are resident, and is awake only while they have their memory."""

_REFUSALS: Mapping[tuple[RegionState, Change], str] = {
    (_ASLEEP, Change.SLEEP): "sleeps already: call wake_up first",
    (_RESIDENT, Change.WAKE): "is awake",
    (_RESIDENT, Change.TAKE_MEMORY): "is awake",
    (_INVALID, Change.WAKE): "is awake, but invalid: complete an update of it",
    (_INVALID, Change.TAKE_MEMORY): "is awake, and waits for an update already",
    (_INVALID, Change.SLEEP): "is invalid: complete an update of it first; weights may also sleep at level 2, which"
    " reads them again",
    (_ASLEEP, Change.INVALIDATE): "sleeps and cannot be updated: call wake_up first",
    (_INVALID, Change.INVALIDATE): "is invalid already",
    (_RESIDENT, Change.RESTORE): "is valid: no update of it is under way",
    (_ASLEEP, Change.RESTORE): "sleeps: no update of it is under way",
}


class Regions:
    """The regions of one engine. Names are as in `RegionStatus.name`; methods that check raise `EngineConflict` for
    what is illegal now, `RequestError` for what is no region, and `ConfigError` for what is no level."""

    def __init__(self, drafters: Iterable[str] = ()):
        """`drafters`: labels of those that are configured."""
        names = (WEIGHTS, KV_CACHE, *map(drafter_region, drafters))
        self._regions = {name: RegionStatus(name=name, state=_RESIDENT) for name in names}

    @property
    def statuses(self) -> tuple[RegionStatus, ...]:
        """Of all regions: weights, KV cache, drafters in the order of the config."""
        return tuple(self._regions.values())

    @property
    def is_asleep(self) -> bool:
        """Whether `wake_up` must come before requests: the weights or the KV cache sleep."""
        return _ASLEEP in (self.state(WEIGHTS), self.state(KV_CACHE))

    @property
    def any_asleep(self) -> bool:
        """Whether some region sleeps."""
        return any(one.state is _ASLEEP for one in self._regions.values())

    def state(self, name: str) -> RegionState:
        """Of one region."""
        return self._known(name).state

    def level(self, name: str) -> int:
        """At which it sleeps; 0 while it does not."""
        return self._known(name).level

    def to_sleep(self, level: int = 1, tags: Collection[str] | None = None) -> tuple[str, ...]:
        """Returns the regions that would sleep. `tags`: their names; None: all that are not asleep."""
        check_level(level)
        names = self._chosen(tags, [name for name, one in self._regions.items() if one.state is not _ASLEEP])
        if not names:
            raise EngineConflict("the engine sleeps already: call wake_up first")
        for name in names:
            if (name, level, self.state(name)) != (WEIGHTS, 2, _INVALID):
                self._check(name, Change.SLEEP)
        if WEIGHTS in names and KV_CACHE not in names and self.state(KV_CACHE) is not _ASLEEP:
            raise EngineConflict(f"{WEIGHTS} cannot sleep while {KV_CACHE} is awake: name both, or {KV_CACHE} before")
        return names

    def to_wake(self, tags: Collection[str] | None = None, *, has_content: bool = True) -> tuple[str, ...]:
        """Returns the regions that would wake up.

        Args:
            tags: their names; None: all that sleep, or all but the KV cache without content.
            has_content: whether weights that level 2 discarded get content; without it they are invalid afterwards.
        """
        asleep = [name for name, one in self._regions.items() if one.state is _ASLEEP]
        names = self._chosen(tags, [name for name in asleep if has_content or name != KV_CACHE])
        if not names:
            raise EngineConflict("the engine is awake" if not asleep else f"only {KV_CACHE} sleeps")
        after = {name: self._check(name, self._waking(name, has_content=has_content)) for name in names}
        if KV_CACHE in names and after.get(WEIGHTS, self.state(WEIGHTS)) is not _RESIDENT:
            raise EngineConflict(
                f"{KV_CACHE} cannot wake up before {WEIGHTS} are there: wake those first, and complete an update where"
                " they wait for one"
            )
        return names

    def note_asleep(self, names: Iterable[str], level: int) -> None:
        """These, of `to_sleep`, sleep now."""
        for name in names:
            self._regions[name] = RegionStatus(name=name, state=_ASLEEP, level=level)

    def note_awake(self, names: Iterable[str], *, has_content: bool = True) -> None:
        """These, of `to_wake` with the same `has_content`, are awake now."""
        for name in names:
            self._change(name, self._waking(name, has_content=has_content), _DISCARDED)

    def invalidate(self, name: str, reason: str) -> None:
        """An update failed while it wrote the weights, or a drafter's (`reason`): nothing is generated with them until
        `restore`."""
        if name == KV_CACHE:
            raise RequestError(f"{KV_CACHE} has no weights to update: name {WEIGHTS}, or a drafter's region")
        self._change(name, Change.INVALIDATE, reason)

    def restore(self, name: str) -> None:
        """An update of all of its weights is complete."""
        self._change(name, Change.RESTORE)

    def check_generates(self, drafters: Iterable[str] = ()) -> None:
        """Raises `EngineConflict` where nothing can be generated now, with these drafters (labels)."""
        if self.is_asleep:
            asleep = [name for name in (WEIGHTS, KV_CACHE) if self.state(name) is _ASLEEP]
            which = "" if len(asleep) == 2 else f" ({asleep[0]})"
            raise EngineConflict(f"the engine sleeps: call wake_up first{which}")
        if self.state(WEIGHTS) is _INVALID:
            raise EngineConflict(self.why_invalid(WEIGHTS))
        for label in drafters:
            state = self.state(drafter_region(label))
            if state is not _RESIDENT:
                raise EngineConflict(
                    f"the drafter {label!r} is {state}: wake it up or complete its update first, or ask for speculation"
                    ' "off"'
                )

    def why_invalid(self, name: str) -> str:
        """What to say of a region that is invalid, and what helps."""
        reason = self._known(name).reason
        if name != WEIGHTS:
            return f"{name} is invalid: {reason}. Update all of its weights"
        return (
            f"the weights are invalid: {reason}. Update all of them, or sleep(2) and wake_up(new_weights=True), which"
            " reads the checkpoint"
        )

    def _chosen(self, tags: Collection[str] | None, default: list[str]) -> tuple[str, ...]:
        """In the order of the regions, each once."""
        if tags is None:
            return tuple(default)
        if isinstance(tags, str) or not isinstance(tags, Collection):
            raise RequestError(f"tags {tags!r} must be a list of regions: {self._names}")
        if not tags:
            raise RequestError(f"tags is empty: leave it out for all regions, or name some of {self._names}")
        for tag in tags:
            self._known(tag)
        return tuple(name for name in self._regions if name in tags)

    def _known(self, name: str) -> RegionStatus:
        found = self._regions.get(name) if isinstance(name, str) else None
        if found is None:
            kind = "drafter" if isinstance(name, str) and name.startswith(DRAFTER_PREFIX) else "region"
            raise RequestError(
                f"there is no {kind} {name!r} to sleep, wake up or update: the regions are {self._names}"
            )
        return found

    @property
    def _names(self) -> str:
        return ", ".join(self._regions)

    def _waking(self, name: str, *, has_content: bool) -> Change:
        return Change.WAKE if has_content or name != WEIGHTS or self.level(name) != 2 else Change.TAKE_MEMORY

    def _check(self, name: str, change: Change) -> RegionState:
        state = self.state(name)
        if (state, change) not in _LEGAL:
            raise EngineConflict(f"{change.value}: {name} {_REFUSALS[state, change]}")
        return _LEGAL[state, change]

    def _change(self, name: str, change: Change, reason: str = "") -> None:
        state = self._check(name, change)
        self._regions[name] = RegionStatus(name=name, state=state, reason=reason if state is _INVALID else "")
