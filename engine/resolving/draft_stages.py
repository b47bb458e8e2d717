"""The rule about drafters that a drafter asks for as its stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.config.resolved import ResolvedDrafter
from dovetail.config.schema import SpeculativeSection
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.speculation import DraftWorker, ReadsHiddenLayers


def refuse_stages(
    name: str,
    plugin: type[DraftWorker],
    labels: Sequence[str],
    section: SpeculativeSection,
    under_way: Sequence[str],
) -> None:
    """Raises `ConfigError` for labels that cannot be the stages of drafter `name`, and `PluginError` where the drafter
    itself contradicts the contract. `under_way`: the drafters whose stages led to this one, itself last."""
    key = f"speculative.drafters.{name}"
    if not labels:
        raise ConfigError(f"{key}: it asks other drafters and names none: write their labels into its options")
    if issubclass(plugin, ReadsHiddenLayers):
        raise PluginError(
            f"{key}: {plugin.__name__} reads states between the target's layers and has stages: the contract gives it"
            " one or the other"
        )
    for label in labels:
        if label not in section.drafters:
            known = [other for other in section.drafters if other != name]
            raise ConfigError(
                f"{key}: its stage {label!r} is no drafter of the config; {nearest(label, known)}. A stage is another"
                " entry of speculative.drafters"
            )
        if label in under_way:
            raise ConfigError(f"{key}: its stage {label!r} asks it in turn ({' -> '.join([*under_way, label])})")
        if labels.count(label) > 1:
            raise ConfigError(f"{key}: its stage {label!r} is named twice")


def refuse_nested(name: str, stages: Iterable[ResolvedDrafter]) -> None:
    """Raises `ConfigError` where a stage of drafter `name` has stages."""
    for stage in stages:
        if stage.stages:
            raise ConfigError(
                f"speculative.drafters.{name}: its stage {stage.name!r} has stages itself ({', '.join(stage.stages)}):"
                " name these"
            )
