"""Checks, before any weight is read, that engines admit the requests of an experiment."""

from __future__ import annotations

from dataclasses import replace

from dovetail.commands.checks import require
from dovetail.commands.datasets import Prompt
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.arms import EnginePlan, Setup
from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS
from dovetail.spec_decode.experiments.datasets import DataSet
from dovetail.spec_decode.experiments.schema import Experiment


def check_admission(experiment: Experiment, setup: Setup, data: DataSet) -> None:
    """Raises `ConfigError` for a batch size that an engine does not run at once, for outputs that do not fit it,
    and for prompts that do not fit or are too few, as far as their lengths are known without a tokenizer."""
    largest = max(experiment.grid.batch_sizes)
    for engine in setup.engines:
        if engine.resolved.limits.max_num_seqs < largest:
            raise ConfigError(
                f"grid.batch_sizes has {largest}, but config.scheduler.max_num_seqs is"
                f" {engine.resolved.limits.max_num_seqs}: raise it, or the requests would queue"
            )
        _check_lengths(experiment, engine, data)


def that_fit(experiment: Experiment, setup: Setup, data: DataSet) -> DataSet:
    """The prompts that the run will use, as far as it is known without a tokenizer: texts are all counted."""
    limit = setup.engines[0].resolved.model.max_model_len
    kept = [
        prompt
        for prompt in data.prompts
        if prompt.token_ids is None or fits(prompt, len(prompt.token_ids), data.name, experiment, limit)
    ]
    return replace(data, prompts=kept)


def _check_lengths(experiment: Experiment, engine: EnginePlan, data: DataSet) -> None:
    limit = engine.resolved.model.max_model_len
    require(
        longest_prompt(experiment, limit) >= 1,
        f"sampling.max_tokens is {experiment.sampling.max_tokens}, but max_model_len is {limit}, which leaves no tokens"
        " for a prompt: lower sampling.max_tokens, or raise config.model.max_model_len",
    )
    lengths = [(prompt, len(prompt.token_ids)) for prompt in data.prompts if prompt.token_ids is not None]
    fitting = sum(fits(prompt, length, data.name, experiment, limit) for prompt, length in lengths)
    check_count(fitting + len(data.prompts) - len(lengths), experiment)


def longest_prompt(experiment: Experiment, max_model_len: int) -> int:
    """Returns the most tokens of a prompt: one fewer than fit, so that whole outputs can be scored as prompts."""
    return max_model_len - experiment.sampling.max_tokens - 1


def fits(prompt: Prompt, length: int, name: str, experiment: Experiment, max_model_len: int) -> bool:
    """Whether a prompt of so many tokens is used. Raises `ConfigError` for one that is too long, unless the experiment
    leaves such prompts out."""
    if length <= longest_prompt(experiment, max_model_len):
        return True
    if experiment.workload.skip_too_long:
        return False
    raise ConfigError(
        f"prompt {prompt.index} of {name} ({prompt.category}) has {length} tokens, and with"
        f" {experiment.sampling.max_tokens} more it exceeds max_model_len {max_model_len}: lower sampling.max_tokens,"
        " or set workload.skip_too_long"
    )


def check_groups(prompts: int, experiment: Experiment) -> None:
    """Raises `ConfigError` where a run until it is decided could decide nothing at some batch size."""
    for batch in experiment.grid.batch_sizes:
        groups = -(-prompts // batch)
        require(
            groups >= MIN_GROUPS,
            f"--until-decided: {prompts} prompts make {groups} groups at batch {batch}, and nothing is decided with"
            f" fewer than {MIN_GROUPS}: give {MIN_GROUPS * batch} prompts or more, or leave --until-decided out",
        )


def check_count(prompts: int, experiment: Experiment) -> None:
    """Raises `ConfigError` where the prompts do not fill the largest batch."""
    largest = max(experiment.grid.batch_sizes)
    require(
        prompts >= largest,
        f"{prompts} prompts fit, fewer than batch size {largest}: lower grid.batch_sizes, or give more prompts",
    )
