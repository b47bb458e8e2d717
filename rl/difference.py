"""How far the log probabilities of an engine are from a trainer's, token by token, for outputs of the engine.

Engines and trainers multiply in other orders, in other dtypes, and split batches otherwise, so that one policy gets two
numbers for one token. A trainer takes the ratio of these for a change of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.llm import LLM

_LARGEST_EXPONENT = 600.0
TrainerLogProbs = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""Token ids of a prompt and of its output to the log probability of each output token."""


@dataclass(frozen=True)
class LogprobDifference:
    """Differences of log probabilities, in nats, over all output tokens. Ratios are exp(trainer - engine), and at most
    e^600, about 4e260, so that all numbers are finite however far off a trainer is."""

    num_sequences: int
    num_tokens: int
    mean: float
    """Of |trainer - engine|, as `p99` and `max`."""
    p99: float
    max: float
    worst: tuple[int, int]
    """Sequence and index in its output of the token with the largest difference, the first of them."""
    bias: float
    """Mean of trainer - engine."""
    kl: float
    """Estimate of KL(engine || trainer) per token: mean of ratio - 1 - log(ratio), which is never negative. Of the
    distributions that are compared only if the tokens were drawn from the engine's, without truncation; otherwise an
    average over the tokens that were drawn."""
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    clip: float
    clipped: float
    """Share of tokens whose ratio is outside [1 - clip, 1 + clip]."""
    effective: float
    """Effective sample size of the ratios as weights, (sum r)^2 / (n sum r^2): 1 where all are equal."""

    def table(self) -> str:
        """All numbers as plain text, one per line."""
        sequence, index = self.worst
        rows = (
            ("sequences", str(self.num_sequences)),
            ("tokens", str(self.num_tokens)),
            ("|difference| mean", f"{self.mean:.3g}"),
            ("|difference| p99", f"{self.p99:.3g}"),
            ("|difference| max", f"{self.max:.3g} (token {index} of sequence {sequence})"),
            ("trainer - engine, mean", f"{self.bias:+.3g}"),
            ("KL(engine || trainer)", f"{self.kl:.3g}"),
            ("ratio mean", f"{self.ratio_mean:.6g}"),
            ("ratio min, max", f"{self.ratio_min:.6g}, {self.ratio_max:.6g}"),
            (f"ratio beyond 1 +- {self.clip:g}", f"{self.clipped:.2%}"),
            ("effective sample size", f"{self.effective:.2%}"),
        )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def logprob_difference(
    outputs: Sequence[RequestOutput], trainer: TrainerLogProbs, *, clip: float = 0.2
) -> LogprobDifference:
    """Compares the log probabilities of finished outputs with a trainer's.

    Raw log probabilities are compared as they are; processed ones without their truncation (logprob +
    log(surviving_mass)), that is, after penalties, masks and temperature, which are then the trainer's to apply.

    Args:
        outputs: of requests with `logprobs` (0 is enough), all raw or all processed; not deltas.
        trainer: what gives the other log probabilities, called once for each completion.
        clip: bound of ratios that a trainer would clip at.

    Raises:
        ValueError: there is nothing to compare, log probabilities are missing, mixed, not finite or too few.
    """
    found = [(output.prompt_token_ids, completion) for output in outputs for completion in output.outputs]
    kinds = {_is_processed(completion) for _, completion in found if completion.token_ids}
    if not kinds:
        raise ValueError("there are no output tokens to compare")
    if len(kinds) > 1:
        raise ValueError("some outputs have raw log probabilities and some processed ones: compare them apart")
    parts = [
        _trainers(trainer, prompt, completion, number) - _engines(completion)
        for number, (prompt, completion) in enumerate(found)
    ]
    return _summary(parts, clip)


def transformers_log_probs(model: Any, *, temperature: float = 1.0) -> TrainerLogProbs:
    """The log probabilities of a causal model of Hugging Face transformers, one sequence at a time.

    The softmax is taken in float32, or in float64 where the model has it.

    Args:
        model: on any device; called without gradients.
        temperature: what logits are divided by; 1 beside raw log probabilities, else the rollouts'.
    """
    import torch

    def log_probs(prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        ids = torch.tensor([[*prompt, *output]], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        rows = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        chosen: list[float] = rows.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        return chosen

    return log_probs


def engine_log_probs(llm: LLM) -> TrainerLogProbs:
    """The raw log probabilities that an engine itself gives the tokens as part of a prompt, to compare with raw ones:
    what decoding and prefill alone differ by. That is 0 under `reproducibility: strict`."""

    def log_probs(prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = llm.generate([[*prompt, *output]], params)[0].prompt_logprobs or []
        behind = zip(output, scored[len(prompt) :], strict=True)
        return [position[token].logprob for token, position in behind if position is not None]

    return log_probs


def _is_processed(completion: CompletionOutput) -> bool:
    if completion.logprobs is None or len(completion.logprobs) != len(completion.token_ids):
        raise ValueError("an output has no log probabilities: ask for them with SamplingParams(logprobs=0)")
    return completion.logprobs[0][completion.token_ids[0]].surviving_mass is not None


def _engines(completion: CompletionOutput) -> NDArray[np.float64]:
    """float64 [number of tokens]."""
    entries = [at[token] for token, at in zip(completion.token_ids, completion.logprobs or (), strict=True)]
    # Masses are above 0.
    return np.array([entry.logprob + math.log(entry.surviving_mass or 1.0) for entry in entries], dtype=np.float64)


def _trainers(
    trainer: TrainerLogProbs, prompt: Sequence[int], completion: CompletionOutput, number: int
) -> NDArray[np.float64]:
    """float64 [number of tokens]."""
    if not completion.token_ids:
        return np.empty(0)
    found = np.asarray(trainer(prompt, completion.token_ids), dtype=np.float64)
    if found.shape != (len(completion.token_ids),):
        raise ValueError(
            f"the trainer gave {found.shape} log probabilities for the {len(completion.token_ids)} output tokens of"
            f" sequence {number}: it should give one each"
        )
    if not np.isfinite(found).all():
        index = int(np.flatnonzero(~np.isfinite(found))[0])
        raise ValueError(f"the trainer's log probability of token {index} of sequence {number} is {found[index]}")
    return found


def _summary(parts: Sequence[NDArray[np.float64]], clip: float) -> LogprobDifference:
    differences = np.concatenate(parts)
    bounded = np.minimum(differences, _LARGEST_EXPONENT)
    sizes, ratios = np.abs(differences), np.exp(bounded)
    weights = np.exp(differences - differences.max())  # ratios, of which the largest is 1
    at = int(sizes.argmax())
    starts = np.cumsum([0, *map(len, parts)])
    sequence = int(np.searchsorted(starts, at, side="right")) - 1
    return LogprobDifference(
        num_sequences=len(parts),
        num_tokens=len(differences),
        mean=float(sizes.mean()),
        p99=float(np.quantile(sizes, 0.99)),
        max=float(sizes[at]),
        worst=(sequence, at - int(starts[sequence])),
        bias=float(differences.mean()),
        kl=float((np.expm1(bounded) - differences).mean()),
        ratio_mean=float(ratios.mean()),
        ratio_min=float(ratios.min()),
        ratio_max=float(ratios.max()),
        clip=clip,
        clipped=float((np.abs(ratios - 1) > clip).mean()),
        effective=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    )
