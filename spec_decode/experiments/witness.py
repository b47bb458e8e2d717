"""An acceptance rule that lets another one judge, and writes down what its tokens say about it (`martingale`).

    speculative:
      acceptance: {name: "dovetail.spec_decode.experiments.witness:Witness", rule: "mine.rules:MyRule", path: seen.f64}

Tokens are those of the rule. It reads the target's whole distributions, which takes time: it is for checking a rule,
not for serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dovetail.commands import Component, create_class
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import (
    AcceptanceCapabilities,
    AcceptanceRule,
    Draft,
    Verdict,
    VerifyRequest,
)
from dovetail.spec_decode.experiments.martingale import COLUMNS, Evidence, Observed, observe, weigh


class WitnessOptions(PluginOptions):
    """Options of `Witness`."""

    rule: str
    """The rule that judges: "package.module:Class" or "/absolute/file.py:Class"."""
    options: Mapping[str, Any] = {}
    """Options of that rule."""
    path: Path
    """File to which what is seen of sampled requests is appended: float64 rows, the fields of `martingale.Observed`."""


class Witness(AcceptanceRule):
    """Watches a rule."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options = WitnessOptions
    # What the rule that judges cannot do was refused with its own config.
    capabilities = AcceptanceCapabilities(lossless=True, trees=True, sampling=True)
    options: WitnessOptions

    def __init__(self, options: WitnessOptions):
        super().__init__(options)
        rule, own = create_class(Component("acceptance_rule", options.rule, options.rule, options=options.options))
        assert issubclass(rule, AcceptanceRule)
        self._rule = rule(own)

    def use_operators(self, operators: Operators) -> None:
        """Hands them on."""
        self._rule.use_operators(operators)

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        verdicts = self._rule.verify(requests)
        seen = [
            astuple(one)
            for request, verdict in zip(requests, verdicts, strict=True)
            if not request.sampling.is_greedy
            for one in see(request, verdict)
        ]
        if seen:
            with self.options.path.open("ab") as file:
                np.array(seen, np.float64).tofile(file)
        return verdicts


def see(request: VerifyRequest, verdict: Verdict) -> list[Observed]:
    """What each token of a verdict says, one entry per row that it came from."""
    draft = request.draft
    rows = [0, *(node + 1 for node in verdict.accepted)]
    tokens = [*(draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id]
    target = request.target.probs()[rows].double().cpu().numpy()
    return [observe(p, _overrated(draft, row, p), token) for row, p, token in zip(rows, target, tokens, strict=True)]


def _overrated(draft: Draft, row: int, target: NDArray[np.float64]) -> NDArray[np.bool_] | None:
    """Which tokens the draft overrates after row `row`; None where it has none there. Of drawn siblings the first: the
    distributions of the others depend on what came before them."""
    children = [node for node, parent in enumerate(draft.parent_indices) if parent == row - 1]
    if not children:
        return None
    if draft.probs is not None:
        drawn: NDArray[np.bool_] = draft.probs[children[0]].double().cpu().numpy() > target
        return drawn
    guessed = np.zeros(len(target), bool)
    guessed[[draft.token_ids[node] for node in children]] = True
    return guessed & (target < 1)


def read_evidence(path: Path) -> Evidence:
    """What a witness wrote, from its start. A file that is not there has seen nothing."""
    rows = np.fromfile(path, np.float64) if path.exists() else np.empty(0)
    return weigh(rows[: len(rows) // COLUMNS * COLUMNS])
