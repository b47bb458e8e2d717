"""The experiment file: what users write, validated as a whole before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dovetail.commands import read_file
from dovetail.commands.checks import nearest
from dovetail.contracts.errors import ConfigError

OFF = "off"
BASELINE = "plain"
"""The arm that every other is compared with: the shared config without drafts."""
CONTROL = "plain-again"
"""The baseline a second time, as an arm of its own: what differs between the two is noise."""

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ArmSection(_Section):
    """One arm: how it differs from the shared config."""

    drafter: str | dict[str, Any] | None = None
    """A drafter of `config.speculative.drafters` by name, one written in place, or "off". Left out: the default
    drafter of the arm's config."""
    num_tokens: Count | None = None
    """Draft length of this arm alone, in place of `grid.draft_lengths`. Where the drafter's config writes `length`, the
    most that it drafts."""
    acceptance: str | None = None
    """Rule of `config.speculative.rules` that judges the arm's drafts. Left out: `speculative.acceptance`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Sections of the engine config that differ: {attention: sdpa}, {speculative: {acceptance: typical}}."""

    @field_validator("drafter", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        # YAML reads a bare off as false.
        return OFF if value is False else value


class WorkloadSection(_Section):
    """The prompts of an experiment."""

    data: str = "builtin"
    """"builtin", or the path of a JSONL file (perhaps .gz), from the experiment file's folder."""
    format: Literal["auto", "prompts", "spec_bench", "speed_bench", "humaneval", "gsm8k"] = "auto"
    """Shape of the lines; MT-Bench's is that of Spec-Bench."""
    turns: Literal["first", "all"] = "first"
    """Of conversations. all: what the user says later is asked as well, each time behind the answers of `plain` to what
    came before, the same in every arm. It needs a chat template."""
    categories: tuple[str, ...] = ()
    """Only these; empty: all."""
    per_category: Count | None = None
    """At most so many prompts of each category, the first ones."""
    limit: Count | None = None
    """At most so many prompts in all, taken from the categories in turn."""
    template: Literal["auto", "chat", "raw"] = "auto"
    """chat: each prompt becomes a user's message; raw: as it is; auto: chat where the model has a template."""
    system: str | None = None
    """System message before each prompt, with a chat template."""
    skip_too_long: bool = False
    """Leave out prompts that the model's length does not hold, and say how many; else they are refused."""

    @model_validator(mode="after")
    def _chats(self) -> WorkloadSection:
        if self.turns == "all" and self.template == "raw":
            raise ValueError("turns: all needs a chat template, and template is raw: write turns: first, or chat")
        return self


class SamplingSection(_Section):
    """How tokens are chosen, in every arm alike."""

    max_tokens: Count = 128
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0)
    """Of the requests: prompt i has seed + i in every arm, and others in each repetition."""
    ignore_eos: bool = False
    """True: every request brings exactly max_tokens, so that end-to-end times are of equal lengths."""


class GridSection(_Section):
    """What is varied within the arms."""

    batch_sizes: tuple[Count, ...] = Field(default=(1,), min_length=1)
    """Requests in flight at a time."""
    draft_lengths: tuple[Count, ...] = ()
    """Drafts per round, for arms that do not give `num_tokens`; the most per round where the drafter's config writes
    `length`; empty: what the drafter's config says."""

    @field_validator("batch_sizes", "draft_lengths")
    @classmethod
    def _once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(value))


class LevelsSection(_Section):
    """Limits in milliseconds that a request must keep to count as served well."""

    ttft: Positive | None = None
    """From its arrival to its first token."""
    itl: Positive | None = None
    """Mean time per token after the first."""
    e2e: Positive | None = None
    """From its arrival to its last token."""


class LoadSection(_Section):
    """Open-loop load: requests that come at times of their own, whether earlier ones have finished or not."""

    rates: tuple[Positive, ...] = ()
    """Requests per second; each is measured."""
    arrivals: Literal["poisson", "gamma", "constant"] = "poisson"
    """Gaps between requests: exponential, gamma with shape `burstiness`, or all equal."""
    burstiness: Positive | None = None
    """Shape of gamma gaps: less than 1 comes in bursts, more is steadier than Poisson."""
    trace: str | None = None
    """In place of rates: a file of arrivals, prompt and output lengths (CSV as Azure's, or Mooncake's JSONL), from the
    experiment file's folder."""
    speeds: tuple[Positive, ...] = (1.0,)
    """How many times as fast the trace comes; each is measured."""
    requests: int = Field(default=16, ge=8)
    """Of a segment: it starts with an idle engine and ends with its last request."""
    segments: Count = 6
    """With other prompts and arrivals each, the same in every arm and repetition. Intervals are over segments."""
    slo: LevelsSection = LevelsSection()
    """What goodput asks for; empty: no goodput."""

    @field_validator("rates", "speeds")
    @classmethod
    def _once(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _one_source(self) -> LoadSection:
        if bool(self.rates) == (self.trace is not None):
            raise ValueError("give either rates, in requests per second, or a trace")
        if self.trace is None and "speeds" in self.model_fields_set:
            raise ValueError("speeds belong to a trace: give rates alone")
        if self.trace is not None and "arrivals" in self.model_fields_set:
            raise ValueError("the trace says when requests arrive: leave arrivals out")
        if (self.arrivals == "gamma") != (self.burstiness is not None):
            raise ValueError("burstiness is the shape of gamma gaps: give it with arrivals: gamma, and there alone")
        return self


class Experiment(_Section):
    """An experiment file."""

    name: str = "experiment"
    config: str | dict[str, Any] = Field(default_factory=dict)
    """Engine config that all arms share: its sections, or the path of a config file."""
    arms: dict[ArmName, ArmSection] = Field(min_length=1)
    workload: WorkloadSection = WorkloadSection()
    sampling: SamplingSection = SamplingSection()
    grid: GridSection = GridSection()
    load: LoadSection | None = None
    """Measured after the grid, in the same engines; left out: nothing of the kind."""
    repetitions: Count = 3
    rerun_disturbed: int = Field(default=4, ge=0)
    """Rounds in which other processes took more than 10% of the machine run once more at the end of their repetition
    at that batch size, at most so many in each."""
    warmup: int = Field(default=1, ge=0)
    """Groups per arm and batch size that run before, on prompts of their own, and are dropped."""
    baseline: str = BASELINE
    """The arm that speed is compared with, as `arm` or, with several draft lengths, `arm@4`. Tokens are compared with
    plain's all the same."""
    order: Literal["abba", "random"] = "abba"
    """abba: arms run in a drawn order, then in its reverse, so that a drift of the machine cancels; random: in a newly
    drawn order each time."""
    seed: int = Field(default=0, ge=0)
    """Of the order of arms, of the groups and of the bootstrap."""
    declared_difference: tuple[str, ...] | None = None
    """Config keys in which arms may differ. Left out: those that the arms themselves name."""
    tie_gap: float | None = Field(default=None, ge=0)
    """Log-probability gap below which two tokens are a tie; left out: measured, and at least
    so many rounding steps of the model's dtype."""
    compatibility: bool = True
    """Try request features (logprobs, penalties, stop strings, ...) in each arm and report what ran."""
    keep_going: bool = False
    """Leave arms that are refused out, and report why; else they end the experiment."""

    @model_validator(mode="after")
    def _names(self) -> Experiment:
        for name in (BASELINE, CONTROL):
            if name in self.arms:
                raise ValueError(f"arms.{name}: this arm is always there; name yours otherwise")
        return self


def read_experiment(path: Path) -> Experiment:
    """The experiment of a YAML, JSON or TOML file. Raises `ConfigError` that names the key."""
    data = read_file(path, "experiment file").data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds no mapping of keys; `dovetail ab init` writes an example")
    return parse_experiment(data, str(path))


def parse_experiment(data: Mapping[str, Any], origin: str) -> Experiment:
    """Validates. Raises `ConfigError` with the key, and the nearest one where it is unknown."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_first_issue(error)}") from None


def _first_issue(error: ValidationError) -> str:
    issues = error.errors()
    # A key that is misspelt is missing too: the spelling is what helps.
    issue = next((one for one in issues if one["type"] == "extra_forbidden"), issues[0])
    path = [str(part) for part in issue["loc"]]
    if issue["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(path)!r}: {nearest(path[-1], _keys_at(path[:-1]))}"
    message = str(issue["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(path)}: {message}" if path else message


def _keys_at(path: list[str]) -> list[str]:
    """Keys of the section at a path, as far as the schema itself knows them."""
    model: type[BaseModel] = Experiment
    for key in path:
        if key in model.model_fields:
            found = _model_of(model.model_fields[key].annotation)
            model = found if found is not None else model
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_of(part)) is not None), None)
