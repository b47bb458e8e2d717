"""What the rules of resolution share: what was asked, what was decided so far, and who may be asked."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

from dovetail.config.layers import LayeredConfig, Origin
from dovetail.config.resolved import Decision
from dovetail.config.schema import ComponentSection, ExecutorSection, ModelSection
from dovetail.config.tree import KeyPath, dotted, flatten, get, put
from dovetail.contracts.plugin import Environment
from dovetail.registry.registry import Registry

logger = logging.getLogger("dovetail.config")


class Resolution:
    """One resolution under way. Rules read `config` and write through `decide`, `fill` and `warn` only."""

    def __init__(self, layered: LayeredConfig, registry: Registry, environment: Environment):
        self.layered = layered
        self.config = layered.config
        self.registry = registry
        self.environment = environment
        self._own_machine = environment
        self._decisions: list[Decision] = []
        self.warnings: list[str] = []
        self.remarks: dict[str, str] = {}
        """What was warned of single values, by dotted key."""
        self.fixable: dict[str, list[str]] = {}
        """By reason that the user can mend, the candidates of `auto` that were passed over for it alone."""
        self.values: dict[str, Any] = copy.deepcopy(layered.config.model_dump(mode="json"))
        """The tree so far: what was asked, with decisions in its place."""

    def section(self, path: KeyPath) -> ComponentSection | None:
        """The component that the config asks for at `path`; None where it says null."""
        node: Any = self.config
        for key in path:
            node = node[int(key)] if isinstance(node, list) else (node if isinstance(node, dict) else vars(node))[key]
        found: ComponentSection | None = node
        return found

    @property
    def is_strict(self) -> bool:
        """Whether a request's tokens must not depend on what else is in the batch."""
        return self.config.reproducibility == "strict"

    @property
    def num_replicas(self) -> int:
        """Engines of this config that a server runs, each with all ranks; those of a file count for `LLM` too."""
        server = self.config.server
        return 1 if server is None else server.data_parallel_size

    @property
    def replicas_here(self) -> int:
        """Replicas whose workers share one machine. What workers on other machines share is not known: 1."""
        own = dataclasses.replace(self._own_machine, device_type=self.environment.device_type)
        return self.num_replicas if self.environment == own else 1

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What came out other than it was asked for, in the order in which it was decided."""
        dropped = [
            Decision(dotted(d.path), d.value, get(self.values, d.path), d.reason)
            for d in self.layered.dropped
            if d.value != get(self.values, d.path)
        ]
        return (*dropped, *self._decisions)

    def decide(
        self,
        path: KeyPath | str,
        got: Any,
        reason: str,
        candidates: tuple[tuple[str, tuple[str, ...]], ...] = (),
        *,
        note: bool = False,
    ) -> None:
        """Settles a value. It counts as a decision where it is not what was asked for, and with `note` in any case."""
        path = tuple(path.split(".")) if isinstance(path, str) else path
        asked = get(self.values, path)
        put(self.values, path, got)
        if note or asked != got:
            logger.debug("%s: asked %r, got %r: %s", dotted(path), asked, got, reason)
            self._decisions.append(Decision(dotted(path), asked, got, reason, candidates))

    def fill(self, path: KeyPath, value: Any) -> None:
        """Adds a value that nobody asked about: the default of a plugin's own option."""
        put(self.values, path, value)

    def warn(self, message: str) -> None:
        """Notes something odd that stops nothing."""
        self.warnings.append(message)

    def all_warnings(self) -> tuple[str, ...]:
        """What was warned of; all that `auto` passed over is told in one."""
        passed_over = [f"{', '.join(names)}: {reason}" for reason, names in self.fixable.items()]
        if not passed_over:
            return tuple(self.warnings)
        told = f"auto goes without what can be had on this machine, and is slower for it; {'; '.join(passed_over)}"
        return (*self.warnings, told)

    def within(self, drafter: KeyPath, section: ModelSection) -> Resolution:
        """One in which a drafter's options stand in the place of the section `model`."""
        outer = self.layered
        config = outer.config.model_copy(update={"model": section, "executor": ExecutorSection()})
        origins: dict[KeyPath, Origin] = {}
        for path, origin in outer.origins.items():
            if path[: len(drafter)] == drafter:
                origins["model", *path[len(drafter) :]] = origin
        return Resolution(LayeredConfig(config, origins), self.registry, self.environment)

    def adopt_decisions(self, inner: Resolution, drafter: KeyPath) -> None:
        """What a resolution within this one decided about the section `model`, as decisions about the drafter."""
        for decision in inner.decisions:
            key = tuple(decision.key.split("."))[1:]
            # The name of a component stands for it: these options take names.
            key = key[:-1] if key[-1] == "name" else key
            self.decide((*drafter, *key), decision.got, decision.reason, decision.candidates)

    def take_warnings(self, inner: Resolution, whose: str) -> None:
        """Tells what a resolution within this one warned of."""
        self.warnings += inner.warnings
        for reason, names in inner.fixable.items():
            self.fixable.setdefault(reason, []).extend(f"{name} ({whose})" for name in names)

    def remark(self, key: str, message: str) -> None:
        """Warns of one value, beside which `dovetail explain` says it again."""
        self.warn(f"{key} ({self.layered.origin(key)}): {message}")
        self.remarks[key] = message

    def flat_values(self) -> dict[str, Any]:
        """The tree so far by dotted key."""
        return {dotted(path): value for path, value in flatten(self.values)}
