"""The rule about experiments on live traffic: their arms, and that no request takes part in two."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedSpeculation
from dovetail.config.schema import OFF, ArmSection, ExperimentSection
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.telemetry import ArmDescription, ExperimentDescription
from dovetail.engine.resolving.resolution import Resolution


def describe_experiments(
    state: Resolution, speculation: ResolvedSpeculation | None
) -> tuple[ExperimentDescription, ...]:
    """The config's experiments, in order. Raises `ConfigError` for an arm that cannot be served, and for experiments
    that overlap."""
    sections = state.config.experiments
    _refuse_overlap(state, sections)
    if sections and not state.config.telemetry:
        state.warn(
            "experiments are configured, and nobody counts them: add a sink to the section `telemetry`, as in"
            " telemetry: [{name: experiments, path: arms.jsonl}]"
        )
    return tuple(_describe(state, name, section, speculation) for name, section in sections.items())


def _describe(
    state: Resolution, name: str, section: ExperimentSection, speculation: ResolvedSpeculation | None
) -> ExperimentDescription:
    total = sum(arm.share for arm in section.arms.values())
    return ExperimentDescription(
        name=name,
        arms=tuple(
            ArmDescription(
                name=label,
                share=arm.share / total,
                drafter=_drafter(state, f"experiments.{name}.arms.{label}.speculation", arm, speculation),
            )
            for label, arm in section.arms.items()
        ),
        unit=section.unit,
        slice_s=section.slice_s,
        traffic=section.traffic,
        seed=section.seed,
    )


def _drafter(state: Resolution, key: str, arm: ArmSection, speculation: ResolvedSpeculation | None) -> str | None:
    asked = arm.speculation
    if asked == OFF:
        return None
    if asked is None:
        return speculation.default if speculation is not None else None
    origin = state.layered.origin(key)
    if speculation is None:
        raise ConfigError(
            f"{key} is {asked!r} ({origin}), but the config has no section `speculative`: add it with this drafter"
        )
    if asked not in speculation.drafters:
        near = nearest(asked, [*speculation.drafters, OFF])
        raise ConfigError(f"{key} {asked!r} ({origin}) is no drafter of the config; {near}")
    return asked


def _refuse_overlap(state: Resolution, sections: dict[str, ExperimentSection]) -> None:
    """Experiments divide the units between them, which must be the same ones."""
    first, *others = list(sections) or [""]
    for name in others:
        for key in ("unit", "slice_s", "seed"):
            one, other = (vars(sections[label])[key] for label in (first, name))
            if one != other:
                raise ConfigError(
                    f"experiments.{first} and experiments.{name} overlap: {key} is {one!r}"
                    f" ({state.layered.origin(f'experiments.{first}.{key}')}) and {other!r}"
                    f" ({state.layered.origin(f'experiments.{name}.{key}')}). Experiments that run at once divide the"
                    f" same units between them: give both one {key}, or run one after the other"
                )
    traffic = sum(section.traffic for section in sections.values())
    if traffic > 1 + 1e-9:
        raise ConfigError(
            f"the experiments {', '.join(sections)} overlap: they take {traffic:g} of the traffic together, more than"
            " all of it; lower experiments.*.traffic until the sum is at most 1"
        )
