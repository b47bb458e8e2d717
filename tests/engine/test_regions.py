"""The states of regions: what is legal, checked against a model that spells each rule out; and that refusals change
nothing."""

from __future__ import annotations

from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.regions import KV_CACHE, WEIGHTS, RegionState, drafter_region
from dovetail.engine.regions import Change, Regions

A = drafter_region("a")
NAMES = (WEIGHTS, KV_CACHE, A)


class Model:
    """The rules once more, one region after the other, from the words of docs/rl.md."""

    def __init__(self) -> None:
        self.states = dict.fromkeys(NAMES, "resident")
        self.weights_level = 0

    def sleep(self, level: Any, tags: list[str] | None) -> bool:
        if level not in (1, 2) or tags == [] or not set(tags or ()) <= set(NAMES):
            return False
        names = tags if tags is not None else [name for name in NAMES if self.states[name] != "asleep"]
        after = self.states | dict.fromkeys(names, "asleep")
        for name in names:
            if self.states[name] == "asleep":
                return False
            if self.states[name] == "invalid" and not (name == WEIGHTS and level == 2):
                return False
        if not names or not self._takes(after):
            return False
        if WEIGHTS in names:
            self.weights_level = level
        return True

    def wake_up(self, tags: list[str] | None, has_content: bool) -> bool:
        if tags == [] or not set(tags or ()) <= set(NAMES):
            return False
        asleep = [name for name in NAMES if self.states[name] == "asleep"]
        names = tags if tags is not None else [name for name in asleep if has_content or name != KV_CACHE]
        if not names or any(self.states[name] != "asleep" for name in names):
            return False
        after = self.states | dict.fromkeys(names, "resident")
        if WEIGHTS in names and not has_content and self.weights_level == 2:
            after[WEIGHTS] = "invalid"
        if KV_CACHE in names and after[WEIGHTS] != "resident":
            return False
        return self._takes(after)

    def invalidate(self, name: str) -> bool:
        if name not in (WEIGHTS, A) or self.states[name] != "resident":
            return False
        return self._takes(self.states | {name: "invalid"})

    def restore(self, name: str) -> bool:
        if self.states.get(name) != "invalid":
            return False
        return self._takes(self.states | {name: "resident"})

    def generates(self, drafters: list[str]) -> bool:
        needed = [WEIGHTS, KV_CACHE, *map(drafter_region, drafters)]
        return all(self.states[name] == "resident" for name in needed)

    def _takes(self, after: dict[str, str]) -> bool:
        if after[WEIGHTS] == "asleep" and after[KV_CACHE] != "asleep":
            return False
        self.states = after
        return True


TAGS = [None, *(list(some) for count in range(4) for some in combinations(NAMES, count)), ["drafter:c"], [A, "nothing"]]
COMMANDS: list[tuple[Any, ...]] = [
    *(("sleep", level, tags) for level in (0, 1, 2, 3) for tags in TAGS),
    *(("wake_up", tags, has_content) for tags in TAGS for has_content in (True, False)),
    *((change, name) for change in ("invalidate", "restore") for name in (*NAMES, "drafter:c")),
]


def apply(regions: Regions, command: tuple[Any, ...]) -> None:
    match command:
        case "sleep", level, chosen:
            regions.note_asleep(regions.to_sleep(level, chosen), level)
        case "wake_up", chosen, has_content:
            regions.note_awake(regions.to_wake(chosen, has_content=has_content), has_content=has_content)
        case "invalidate", name:
            regions.invalidate(name, "the disk is full")
        case "restore", name:
            regions.restore(name)


def test_every_change_of_every_state_is_what_the_rules_say() -> None:
    """Of all states that can be reached."""
    seen, open_states = set(), [(Regions(["a"]), Model())]
    while open_states:
        regions, model = open_states.pop()
        if regions.statuses in seen:
            continue
        seen.add(regions.statuses)
        check_generates(regions, model)
        for command in COMMANDS:
            after, expected = deepcopy(regions), deepcopy(model)
            is_legal = getattr(expected, command[0])(*command[1:])
            try:
                apply(after, command)
            except (RequestError, ConfigError):
                assert not is_legal, (regions.statuses, command)
                assert after.statuses == regions.statuses
            else:
                assert is_legal, (regions.statuses, command)
                open_states.append((after, expected))
            assert {one.name: one.state.value for one in after.statuses} == expected.states
            assert all((one.level in (1, 2)) == (one.state is RegionState.ASLEEP) for one in after.statuses)
    assert len(seen) == 48, "12 of weights and KV cache, and 4 of the drafter"


def check_generates(regions: Regions, model: Model) -> None:
    for drafters in ([], ["a"]):
        try:
            regions.check_generates(drafters)
        except EngineConflict:
            assert not model.generates(drafters)
        else:
            assert model.generates(drafters)


@pytest.mark.parametrize(
    ("before", "command", "message"),
    [
        ([("sleep", 1, None)], ("sleep", 1, None), "sleeps already: call wake_up first"),
        ([("sleep", 1, [KV_CACHE])], ("sleep", 1, [KV_CACHE]), "kv_cache sleeps already"),
        ([], ("wake_up", None, True), "the engine is awake"),
        ([], ("wake_up", [A], True), "drafter:a is awake"),
        ([("sleep", 1, None)], ("wake_up", [KV_CACHE], True), "kv_cache cannot wake up before weights"),
        ([], ("sleep", 1, [WEIGHTS]), "weights cannot sleep while kv_cache is awake"),
        ([("sleep", 1, None)], ("invalidate", WEIGHTS), "weights sleeps and cannot be updated"),
        ([("invalidate", WEIGHTS)], ("invalidate", WEIGHTS), "is invalid already"),
        ([("invalidate", WEIGHTS)], ("sleep", 1, None), "weights is invalid: complete an update"),
        ([], ("restore", A), "drafter:a is valid"),
        (
            [("sleep", 2, None), ("wake_up", [WEIGHTS], False)],
            ("wake_up", None, True),
            "kv_cache cannot wake up before",
        ),
        ([("sleep", 1, [KV_CACHE])], ("wake_up", None, False), "only kv_cache sleeps"),
    ],
)
def test_a_conflict_is_named(before: list[tuple[Any, ...]], command: tuple[Any, ...], message: str) -> None:
    regions = Regions(["a"])
    for each in before:
        apply(regions, each)
    with pytest.raises(EngineConflict, match=message):
        apply(regions, command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("sleep", 1, ["kv"]), "no region 'kv'.*weights, kv_cache, drafter:a"),
        (("sleep", 1, ["drafter:x"]), "no drafter 'drafter:x'"),
        (("sleep", 1, "weights"), "tags 'weights' must be a list"),
        (("wake_up", [], True), "tags is empty"),
        (("invalidate", KV_CACHE), "kv_cache has no weights to update"),
    ],
)
def test_what_names_nothing_is_no_conflict(command: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        apply(Regions(["a"]), command)
    assert not isinstance(caught.value, EngineConflict)


def test_every_change_of_every_state_is_legal_or_has_words() -> None:
    from dovetail.engine.regions import _LEGAL, _REFUSALS

    assert set(_LEGAL) | set(_REFUSALS) == {(state, change) for state in RegionState for change in Change}
    assert not set(_LEGAL) & set(_REFUSALS)


def test_what_is_invalid_says_why() -> None:
    regions = Regions()
    regions.invalidate(WEIGHTS, "the disk is full")
    with pytest.raises(EngineConflict, match=r"weights are invalid: the disk is full\. Update all of them"):
        regions.check_generates()
