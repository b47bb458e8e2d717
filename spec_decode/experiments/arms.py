"""Resolves the arms of an experiment, refuses some, and distributes the others over engines.

Arms that differ in their drafter alone run in one engine, which holds all their drafters over one target; a request
chooses by `SamplingParams.speculation`. Arms that differ in more (acceptance rule, attention backend, ...) get engines
of their own, which live in the same process side by side, so that their groups can be interleaved all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail.commands import Component, Explanation, LayeredConfig, ResolvedConfig, create_class, explain, load_config
from dovetail.commands.checks import nearest, require
from dovetail.contracts.draft_length import AdaptiveDraftLength
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.contracts.speculation import AcceptanceRule, DraftWorker
from dovetail.spec_decode.experiments.arm_drafters import Written, with_drafters
from dovetail.spec_decode.experiments.records import label_of
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL, OFF, ArmSection, Experiment
from dovetail.spec_decode.experiments.speed import VariantKey, variant_named


@dataclass(frozen=True)
class Variant:
    """An arm at one draft length: what runs, and a row of the tables."""

    arm: str
    length: int | None
    """Drafts per round at most; None for arms that do not draft."""
    is_fixed: bool = True
    """Whether every round drafts as many."""
    acceptance: str | None = None
    """Rule that its requests name."""

    @property
    def label(self) -> str:
        """The variant's name in tables."""
        return label_of(self.arm, self.length, is_fixed=self.is_fixed)


@dataclass(frozen=True)
class Arm:
    """One resolved arm, before arms share engines."""

    name: str
    layered: LayeredConfig
    resolved: ResolvedConfig
    drafter: str | None
    """The drafter's key in the arm's own config."""
    lengths: tuple[int, ...]
    """Draft lengths; empty for arms that do not draft."""
    is_swept: bool
    """Whether the experiment alone sets the draft length: `length: fixed`. Otherwise the `length` of the drafter
    decides, up to `lengths`, or its default where the experiment gives no lengths."""
    is_fixed: bool
    """Whether every round drafts as many."""
    is_lossless: bool
    """Whether the acceptance rule declares lossless; True for arms that do not draft."""
    draws_seeded: bool = False
    """Whether seeded requests may get drafts that were drawn, and so other tokens than without drafts."""
    warnings: tuple[str, ...] = ()
    acceptance: str | None = None
    """Rule of the config's `speculative.rules` that its requests name."""

    def variants(self) -> list[Variant]:
        """Returns one variant per draft length."""
        drafting = [Variant(self.name, length, self.is_fixed, self.acceptance) for length in self.lengths]
        return drafting or [Variant(self.name, None)]


@dataclass(frozen=True)
class EnginePlan:
    """One engine, and the variants that run in it."""

    layered: LayeredConfig
    explanation: Explanation
    resolved: ResolvedConfig
    variants: tuple[Variant, ...]
    kv_tokens_alone: int | None
    """Estimated KV memory in tokens without drafters; None where it is not known."""


@dataclass(frozen=True)
class Line:
    """One value in which arms differ."""

    key: str
    values: Mapping[str, Any]
    """Values by arm."""


@dataclass(frozen=True)
class Setup:
    """The engines and variants that will run."""

    arms: Mapping[str, Arm]
    engines: Sequence[EnginePlan]
    refused: Mapping[str, str]
    """Reasons of refused arms, by arm."""
    differences: Sequence[Line]
    undeclared: Sequence[str]
    """Keys that differ without being declared; not empty only where that was allowed."""
    notes: Sequence[str] = field(default=())

    @property
    def has_adaptive_lengths(self) -> bool:
        """Whether some arm does not draft as many in every round."""
        return not all(arm.is_fixed for arm in self.arms.values())

    def label(self, arm: str, length: int | None) -> str:
        """A variant's name in tables."""
        return label_of(arm, length, is_fixed=arm not in self.arms or self.arms[arm].is_fixed)


def prepare(experiment: Experiment, folder: Path, *, allow: bool) -> Setup:
    """Resolves every arm. No weight is read. Raises `ConfigError` for arms that cannot run or do not differ."""
    base = _base_config(experiment, folder)
    arms: dict[str, Arm] = {}
    refused: dict[str, str] = {}
    sections = {BASELINE: ArmSection(drafter=OFF), **experiment.arms}
    for name, section in sections.items():
        try:
            arms[name] = _resolve_arm(name, section, experiment, base, folder)
        except DovetailError as error:
            if name == BASELINE:
                raise
            require(experiment.keep_going, f"arm {name!r} is refused: {error} (keep_going: true leaves such arms out)")
            refused[name] = str(error)
    require(len(arms) > 1, f"no arm is left to compare: {'; '.join(f'{n}: {r}' for n, r in refused.items())}")
    _refuse_equal(arms)
    differences = list(_differences(arms))
    undeclared = _undeclared(experiment, differences)
    if undeclared and not allow:
        raise ConfigError(
            f"arms differ in {', '.join(undeclared)}, which are not declared: name them in declared_difference, write"
            " them into the shared config, or give --allow"
        )
    engines = _plan_engines(arms)
    _refuse_other_threads(engines)
    return Setup(arms, engines, refused, differences, undeclared, list(_engine_notes(arms, engines)))


def _base_config(experiment: Experiment, folder: Path) -> str | Path | Mapping[str, Any]:
    return folder / experiment.config if isinstance(experiment.config, str) else experiment.config


def _resolve_arm(
    name: str, section: ArmSection, experiment: Experiment, base: str | Path | Mapping[str, Any], folder: Path
) -> Arm:
    keywords = dict(section.config)
    if isinstance(section.drafter, dict):
        own = dict(keywords.get("speculative") or {})
        own["drafters"] = {**dict(own.get("drafters") or {}), name: section.drafter}
        keywords["speculative"] = own
    layered = load_config(base, keywords=keywords, base_dir=folder)
    drafter = _drafter_of(name, section, layered)
    lengths: tuple[int, ...] = ()
    is_swept, is_fixed = False, True
    if drafter is not None:
        assert layered.config.speculative is not None
        configured = layered.config.speculative.drafters[drafter]
        own_length = (section.num_tokens,) if section.num_tokens is not None else ()
        swept = own_length or experiment.grid.draft_lengths
        lengths = swept or (configured.num_tokens,)
        is_swept = bool(swept) and "length" not in configured.model_fields_set
        is_fixed = is_swept or configured.length == "fixed"
    elif section.num_tokens is not None:
        raise ConfigError(f"arms.{name}.num_tokens: the arm drafts nothing; leave it out, or name a drafter")
    longest = {name: Written(layered, drafter, _length(max(lengths), is_swept))} if drafter is not None else {}
    explanation = explain(with_drafters(layered, longest))
    if explanation.resolved is None:
        raise explanation.refusal or ConfigError(f"arm {name!r} cannot be resolved")
    if drafter is None and section.acceptance is not None:
        raise ConfigError(f"arms.{name}.acceptance: the arm drafts nothing; leave it out, or name a drafter")
    if drafter is not None:
        _check_temperature(_rule_of(name, section, explanation.resolved), experiment)
    return Arm(
        name,
        layered,
        explanation.resolved,
        drafter,
        lengths,
        is_swept,
        is_fixed,
        drafter is None or _is_lossless(_rule_of(name, section, explanation.resolved)),
        drafter is not None and _draws_seeded(explanation.resolved),
        explanation.warnings,
        section.acceptance,
    )


def _rule_of(name: str, section: ArmSection, resolved: ResolvedConfig) -> Component:
    """The acceptance rule that judges an arm's drafts. Raises `ConfigError`."""
    assert resolved.speculation is not None
    rules = resolved.speculation.rules
    if section.acceptance is None:
        return resolved.speculation.acceptance
    if section.acceptance not in rules:
        raise ConfigError(
            f"arms.{name}.acceptance: {section.acceptance!r} is not among config.speculative.rules;"
            f" {nearest(section.acceptance, rules)}"
        )
    return rules[section.acceptance]


def _drafter_of(name: str, section: ArmSection, layered: LayeredConfig) -> str | None:
    speculative = layered.config.speculative
    if isinstance(section.drafter, dict):
        return name
    if section.drafter == OFF or (section.drafter is None and speculative is None):
        return None
    if speculative is None:
        raise ConfigError(f"arms.{name}.drafter: {section.drafter!r} is no drafter: config.speculative has none")
    wanted = section.drafter
    if wanted is None:
        # As the engine reads it: auto is the only drafter.
        names = list(speculative.drafters)
        wanted = names[0] if speculative.default == "auto" and len(names) == 1 else speculative.default
        if wanted is None or wanted == OFF:
            return None
    if wanted not in speculative.drafters:
        known = ", ".join(speculative.drafters)
        raise ConfigError(f"arms.{name}.drafter: {wanted!r} is not among config.speculative.drafters ({known}, or off)")
    return wanted


def _check_temperature(acceptance: Component, experiment: Experiment) -> None:
    """Refuses temperatures that the engine would refuse, before any weight is read."""
    rule, _ = create_class(acceptance)
    if experiment.sampling.temperature > 0 and issubclass(rule, AcceptanceRule) and not rule.capabilities.sampling:
        raise ConfigError(
            f"acceptance rule {acceptance.name!r} serves temperature 0 only, and sampling.temperature is"
            f" {experiment.sampling.temperature:g}: set it to 0, or name another speculative.acceptance"
        )


def _is_lossless(acceptance: Component) -> bool:
    rule, _ = create_class(acceptance)
    return not issubclass(rule, AcceptanceRule) or rule.capabilities.lossless


def _draws_seeded(resolved: ResolvedConfig) -> bool:
    """Where the length adapts, the host lets no drafter draw for seeded requests."""
    assert resolved.speculation is not None
    lengths = [create_class(drafter.length)[0] for drafter in resolved.speculation.drafters.values()]
    return _draws(resolved) and not all(issubclass(length, AdaptiveDraftLength) for length in lengths)


def _draws(resolved: ResolvedConfig) -> bool:
    """Whether a drafter of the config draws tokens."""
    assert resolved.speculation is not None
    workers = [create_class(drafter.component)[0] for drafter in resolved.speculation.drafters.values()]
    return any(issubclass(worker, DraftWorker) and worker.capabilities.probabilities for worker in workers)


def _length(num_tokens: int, is_swept: bool) -> Mapping[str, Any]:
    """Returns the keys of a drafter's section that set its length."""
    return {"num_tokens": num_tokens} | ({"length": "fixed", "min_confidence": None} if is_swept else {})


def baseline_of(experiment: Experiment, setup: Setup) -> VariantKey:
    """What speed is compared with. Raises `ConfigError` for a name that is no arm's."""
    variants = [variant for plan in setup.engines for variant in plan.variants if variant.arm != CONTROL]
    return variant_named(experiment.baseline, {(v.arm, v.length): v.label for v in variants})


def drafter_name(variant: Variant) -> str:
    """Returns a variant's drafter as the engine's config and `SamplingParams.speculation` name it; "off" for none."""
    return OFF if variant.length is None else f"{variant.arm}-at-{variant.length}"


def reads_prediction(resolved: ResolvedConfig, variant: Variant) -> bool:
    """Whether a variant's drafter, or a stage of it, guesses from predictions; `resolved`: of its engine."""
    if variant.length is None or resolved.speculation is None:
        return False
    return resolved.speculation.drafters[drafter_name(variant)].abilities.reads_prediction


def effective_values(arm: Arm) -> dict[str, Any]:
    """The arm's resolved config as flat plain data, its drafter under `speculative.drafter`."""
    tree = dict(arm.resolved.values)
    speculative = tree.pop("speculative", None)
    flat = dict(_flatten(tree))
    if arm.drafter is not None and speculative is not None:
        drafter = next(iter(speculative["drafters"].values()))
        flat |= dict(_flatten({k: v for k, v in drafter.items() if k != "num_tokens"}, "speculative.drafter"))
        flat["speculative"] = "drafts"
        flat["speculative.drafter.num_tokens"] = list(arm.lengths)
        flat |= dict(_flatten(_shared_speculation(speculative), "speculative"))
        flat["speculative.rule_of_requests"] = arm.acceptance
    else:
        flat["speculative"] = OFF
    return flat


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


_SWEPT = (
    ". A draft length that the experiment gives (num_tokens, grid.draft_lengths) is drafted in every round, `length:"
    " fixed`; write `length: adaptive` into an arm's drafter to have it drafted at most"
)


def _refuse_equal(arms: Mapping[str, Arm]) -> None:
    seen: dict[str, str] = {}
    for arm in arms.values():
        content = json.dumps(effective_values(arm), sort_keys=True, default=str)
        if content in seen:
            raise ConfigError(
                f"arms {seen[content]!r} and {arm.name!r} do not differ: both resolve to the same config. Change one"
                f" (drafter, num_tokens, config), or leave it out; {CONTROL!r} already measures the noise"
                f"{_SWEPT if arm.is_swept else ''}"
            )
        seen[content] = arm.name


def _differences(arms: Mapping[str, Arm]) -> Iterator[Line]:
    flats = {name: effective_values(arm) for name, arm in arms.items()}
    keys = dict.fromkeys(key for flat in flats.values() for key in flat)
    for key in keys:
        values = {name: flat.get(key) for name, flat in flats.items()}
        if all(value in (None, {}) for value in values.values()) and any(k.startswith(f"{key}.") for k in keys):
            # Empty in one arm and filled in another: the keys beneath say in what they differ.
            continue
        if len({json.dumps(value, sort_keys=True, default=str) for value in values.values()}) > 1:
            yield Line(key, values)


def _undeclared(experiment: Experiment, differences: Sequence[Line]) -> list[str]:
    declared = experiment.declared_difference
    if declared is None:
        named = {key for arm in experiment.arms.values() for key, _ in _flatten(arm.config)}
        # A component may be written as its name alone.
        declared = ("speculative", *(key.removesuffix(".name") for key in named))
    return [
        line.key
        for line in differences
        if not any(line.key == prefix or line.key.startswith(f"{prefix}.") for prefix in declared)
    ]


def _shared_speculation(speculative: Mapping[str, Any]) -> dict[str, Any]:
    """What all drafters of an engine have in common: the acceptance rule, and whatever else is set there."""
    return {key: value for key, value in speculative.items() if key not in ("drafters", "default")}


def _engine_key(arm: Arm) -> str:
    tree = {key: value for key, value in arm.resolved.values.items() if key != "speculative"}
    return json.dumps(tree, sort_keys=True, default=str)


def _plan_engines(arms: Mapping[str, Arm]) -> list[EnginePlan]:
    shared: dict[tuple[str, str], list[Arm]] = {}
    for arm in (arm for arm in arms.values() if arm.drafter is not None):
        own = json.dumps(_shared_speculation(arm.resolved.values["speculative"]), sort_keys=True, default=str)
        shared.setdefault((_engine_key(arm), own), []).append(arm)
    for arm in (arm for arm in arms.values() if arm.drafter is None):
        # An arm without drafts goes into whatever engine has its config otherwise: one target, not two.
        key = next((key for key in shared if key[0] == _engine_key(arm)), (_engine_key(arm), ""))
        shared.setdefault(key, []).append(arm)
    return [_plan_engine(members) for members in shared.values()]


def _refuse_other_threads(engines: Sequence[EnginePlan]) -> None:
    threads = {(e.resolved.num_threads, e.resolved.executor.options.get("threads")) for e in engines}
    if len(threads) > 1:
        raise ConfigError(
            "arms differ in executor.threads, which all engines of one process share: give all the same, and compare"
            " numbers of threads with `dovetail bench` and `bench compare`"
        )


def _plan_engine(members: Sequence[Arm]) -> EnginePlan:
    variants = [variant for arm in members for variant in arm.variants()]
    if any(arm.name == BASELINE for arm in members):
        variants.insert(0, Variant(CONTROL, None))
    by_name = {arm.name: arm for arm in members}
    drafters = {
        drafter_name(variant): Written(
            by_name[variant.arm].layered,
            by_name[variant.arm].drafter or "",
            _length(variant.length, by_name[variant.arm].is_swept),
        )
        for variant in variants
        if variant.length is not None
    }
    first = next((arm for arm in members if arm.drafter is not None), members[0])
    layered = with_drafters(first.layered, drafters)
    explanation = explain(layered)
    if explanation.resolved is None:
        raise ConfigError(
            f"arms {', '.join(by_name)} cannot share an engine: {explanation.refusal}; run them in experiments of"
            " their own"
        )
    alone = explain(with_drafters(first.layered, {})).estimate if drafters else explanation.estimate
    kv_tokens = alone.kv_tokens if alone is not None else None
    return EnginePlan(layered, explanation, explanation.resolved, tuple(variants), kv_tokens)


def with_rules(plan: EnginePlan, acceptance: Mapping[str, Any], rules: Mapping[str, Mapping[str, Any]]) -> EnginePlan:
    """The engine with other acceptance rules: sections as in the config, the default and those that requests name."""
    speculative = plan.layered.config.speculative
    assert speculative is not None
    section = type(speculative.acceptance).model_validate(acceptance)
    others = {name: type(speculative.rules[name]).model_validate(rule) for name, rule in rules.items()}
    update = {"speculative": speculative.model_copy(update={"acceptance": section, "rules": others})}
    layered = replace(plan.layered, config=plan.layered.config.model_copy(update=update))
    explanation = explain(layered)
    if explanation.resolved is None:
        raise explanation.refusal or ConfigError(f"no engine can have the acceptance rule {section.name}")
    return replace(plan, layered=layered, explanation=explanation, resolved=explanation.resolved)


def with_fixed_lengths(setup: Setup) -> Setup:
    """The same engines with every drafter at its full length in every round; one that cannot be had so stays as it
    is."""
    arms = {
        name: replace(arm, draws_seeded=arm.drafter is not None and _draws(arm.resolved))
        for name, arm in setup.arms.items()
    }
    return replace(setup, arms=arms, engines=[_with_fixed_lengths(plan) for plan in setup.engines])


def _with_fixed_lengths(plan: EnginePlan) -> EnginePlan:
    speculative = plan.layered.config.speculative
    if speculative is None:
        return plan
    drafters = {
        name: section.model_copy(update=_length(section.num_tokens, is_swept=True))
        for name, section in speculative.drafters.items()
    }
    update = {"speculative": speculative.model_copy(update={"drafters": drafters})}
    layered = replace(plan.layered, config=plan.layered.config.model_copy(update=update))
    explanation = explain(layered)
    if explanation.resolved is None:
        return plan
    return replace(plan, layered=layered, explanation=explanation, resolved=explanation.resolved)


def _engine_notes(arms: Mapping[str, Arm], engines: Sequence[EnginePlan]) -> Iterator[str]:
    if len(engines) > 1:
        names = ["/".join(v.label for v in engine.variants if v.arm != CONTROL) for engine in engines]
        yield (
            f"{len(engines)} engines in this process, since arms differ in more than their drafter: {'; '.join(names)}."
            " Their groups are interleaved; each holds weights and KV memory of its own."
        )
    for engine in engines:
        for name in dict.fromkeys(variant.arm for variant in engine.variants if variant.arm in arms):
            alone = arms[name].resolved.attention.name
            if alone != engine.resolved.attention.name:
                yield (
                    f"{name} runs on attention backend {engine.resolved.attention.name}, which all drafters of its"
                    f" engine together need; alone it would be {alone}."
                )
    swept = [arm.name for arm in arms.values() if arm.is_swept]
    if swept:
        yield (
            f"{', '.join(swept)}: the experiment's draft lengths are drafted in every round (length: fixed); a drafter"
            " that writes `length` itself keeps it."
        )
    for arm in arms.values():
        for warning in arm.warnings:
            yield f"{arm.name}: {warning}"
