"""Engines whose acceptance rules are watched, and what a run says of the rule that judged it.

The evidence is a martingale's (`dovetail.spec_decode.experiments.martingale`): it needs no exact probabilities, and
holds for any length of output, unlike that of test_lossless_sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.spec_decode.experiments.judging import LOSSY_BELOW
from dovetail.spec_decode.experiments.martingale import Evidence
from dovetail.spec_decode.experiments.witness import read_evidence

REJECTION = "dovetail.spec_decode.rejection:RejectionRule"
BLOCK = "dovetail.spec_decode.block:BlockRule"
RULES: Mapping[str, str | None] = {"rejection": None, "block": "block"}
"""By the rule's name, what requests say (`SamplingParams.acceptance`) to be judged by it."""
SURE = LOSSY_BELOW / 100
"""Of the many tests here none may fail by chance: evidence like this comes at most once in 100,000 runs of each."""
NUM_REQUESTS = 40
PARAMS = SamplingParams(temperature=1.4, max_tokens=48, ignore_eos=True)
PROMPTS = ["Once upon a time", "One day a little", "Lily liked to", "The dog. The dog"]


def witness(rule: str, seen: Path) -> dict[str, Any]:
    """The section of a rule that is watched: what is seen of it is appended to `seen`."""
    return {"name": "dovetail.spec_decode.experiments.witness:Witness", "rule": rule, "path": str(seen)}


def rules(seen: Path, default: str = REJECTION) -> dict[str, Any]:
    """Keys of the section `speculative`: `RULES`, both watched."""
    return {"acceptance": witness(default, seen), "rules": {"block": witness(BLOCK, seen)}}


@dataclass(frozen=True)
class Watched:
    """An engine that has `rules(seen)`."""

    llm: LLM
    seen: Path

    def run(
        self, drafter: str, params: Sequence[SamplingParams], prompts: Sequence[Any] = PROMPTS, **changes: Any
    ) -> Run:
        """Requests of these parameters, with `prompts` in turn. `changes`: of all their parameters."""
        self.seen.unlink(missing_ok=True)
        given = [prompts[index % len(prompts)] for index in range(len(params))]
        own = [replace(one, speculation=drafter, **changes) for one in params]
        outputs = self.llm.generate(given, own, use_tqdm=False)
        assert all(output.metrics.drafter_error is None for output in outputs)
        return Run(read_evidence(self.seen), outputs)


@dataclass(frozen=True)
class Run:
    """What came of some requests."""

    evidence: Evidence
    outputs: list[RequestOutput] = field(repr=False)

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each request."""
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def num_preemptions(self) -> int:
        """Of all requests."""
        return sum(output.metrics.num_preemptions for output in self.outputs)

    def assert_lossless(self) -> None:
        """Enough was drafted, and nothing speaks against the rule."""
        assert self.evidence.places > 100
        assert self.evidence.p > SURE


def seeded(params: SamplingParams = PARAMS, count: int = NUM_REQUESTS) -> list[SamplingParams]:
    """`count` requests of their own seeds."""
    return [replace(params, seed=seed) for seed in range(count)]
