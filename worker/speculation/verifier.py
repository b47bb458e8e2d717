"""Verifier: shows an acceptance rule what the target says about drafts, and turns its verdicts into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from torch import Tensor

from dovetail.contracts.speculation import AcceptanceRule, Draft, TargetView, Verdict, VerifyRequest
from dovetail.contracts.step import TokenLogprobs
from dovetail.worker.sampling.sampler import SampleOutput, Sampler
from dovetail.worker.sampling.streams import ACCEPT, SAMPLE, uniforms
from dovetail.worker.speculation.checked import checked_verdict
from dovetail.worker.speculation.draft_sampling import TargetRows
from dovetail.worker.speculation.rules import Rules


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """One request whose drafts were computed in this step: its last known token and k nodes, so k + 1 rows."""

    seq_id: int
    position: int
    """Absolute position of the first draft, which is the number of known tokens."""
    draft: Draft
    """The nodes that were computed; see `first_nodes` where not all were."""


class RequestRows(TargetView):
    """The rows from `start` to `end` of a step's."""

    def __init__(self, rows: TargetRows, start: int, end: int):
        self._rows = rows
        self._start, self._end = start, end

    def probs(self) -> Tensor:
        """As `TargetView.probs`."""
        return self._rows.probs(np.arange(self._start, self._end))

    def tokens(self) -> Sequence[int]:
        """As `TargetView.tokens`."""
        return self._rows.tokens(self._start, self._end)

    def joined(self, views: Sequence[TargetView]) -> Tensor:
        """As `TargetView.joined`."""
        own = [view for view in views if isinstance(view, RequestRows)]
        if len(own) != len(views):
            raise ValueError("targets_of takes requests of one call of verify")
        return self._rows.probs(np.concatenate([np.arange(view._start, view._end) for view in own]))


@dataclass(frozen=True)
class VerifyOutput:
    """What was accepted, one entry per request in order; both lists are empty for requests that failed.

    Where the rule gave no usable verdict no draft is accepted, and the one token is drawn as if there had been none.
    """

    accepted: list[list[int]]
    """Node indices from the root down."""
    token_ids: list[list[int]]
    """The accepted drafts and the token after them."""
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By request, for those that want them: one entry per token."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """By request, the message for its user."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """By request, why the rule could not judge its drafts."""


class Verifier:
    """Runs acceptance rules over the distributions that the sampler computes.

    Masks, penalties and logits processors apply to every row, each with the drafts that lead to it counted as output;
    nothing applies to the bonus token alone. Stopping (end tokens, lengths) is left to the engine.
    """

    def __init__(self, rules: Rules, sampler: Sampler):
        self._rules = rules
        self._sampler = sampler

    def verify(self, logits: Tensor, requests: Sequence[DraftedRequest]) -> VerifyOutput:
        """Decides about the drafts of `requests`, and records the tokens that come of it in the sampler.

        Args:
            logits: [M, vocab_size], any float type: the k + 1 rows of each request, one request after the other. Row 0
                of a request follows its last known token, row i + 1 its node i.
            requests: no two of one seq_id.
        """
        paths = [path for request in requests for path in draft_paths(request.draft)]
        sizes = [len(request.draft.token_ids) + 1 for request in requests]
        starts = [0, *accumulate(sizes)]
        seq_ids = [request.seq_id for request, size in zip(requests, sizes, strict=True) for _ in range(size)]
        roots = [request.position for request, size in zip(requests, sizes, strict=True) for _ in range(size)]
        positions = np.array([root + len(path) for root, path in zip(roots, paths, strict=True)], dtype=np.int64)
        target = TargetRows(self._sampler, logits, seq_ids, positions, paths)
        # What is wrong below a draft concerns the request only if the draft is accepted.
        failed = {starts.index(row): text for row, text in target.failed.items() if row in starts}
        faults = {i: reason for i, reason in self._refused(requests).items() if i not in failed}
        judged = [i for i in range(len(requests)) if i not in failed and i not in faults]
        views = self._views(target, requests, judged, starts, self._uniforms(seq_ids, roots, sizes))
        accepted: list[list[int]] = [[] for _ in requests]
        token_ids: list[list[int]] = [[] for _ in requests]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for i, verdict in zip(judged, self._judge(views, judged, faults), strict=True):
            if verdict is None:
                continue
            rows = [starts[i], *(starts[i] + node + 1 for node in verdict.accepted)]
            if rows[-1] in target.failed:
                failed[i] = target.failed[rows[-1]]
                continue
            request = requests[i]
            accepted[i] = list(verdict.accepted)
            token_ids[i] = [request.draft.token_ids[node] for node in verdict.accepted] + [verdict.next_token_id]
            self._sampler.commit(request.seq_id, token_ids[i])
            if entries := self._sampler.row_logprobs(logits, target.edited, rows, request.seq_id, token_ids[i]):
                logprobs[i] = entries
        if faults:
            faulted = sorted(faults)
            drawn = self._drawn(logits, [requests[i] for i in faulted], [starts[i] for i in faulted])
            failed |= {faulted[row]: message for row, message in drawn.failed.items()}
            logprobs |= {faulted[row]: [entry] for row, entry in drawn.logprobs.items()}
            for i, token in zip(faulted, drawn.token_ids.tolist(), strict=True):
                if i not in failed:
                    token_ids[i] = [token]
        return VerifyOutput(accepted, token_ids, logprobs, failed, faults)

    def _drawn(self, logits: Tensor, requests: Sequence[DraftedRequest], rows: Sequence[int]) -> SampleOutput:
        """For requests that the rule could not judge, whose first rows are `rows`: the token that a step without drafts
        draws."""
        positions = np.array([request.position for request in requests], dtype=np.int64)
        return self._sampler.sample(logits[list(rows)], [request.seq_id for request in requests], positions)

    def _refused(self, requests: Sequence[DraftedRequest]) -> dict[int, str]:
        """Requests that the rule does not serve."""
        refused = {}
        for i, request in enumerate(requests):
            sampling = self._sampler.sampling(request.seq_id)
            rule = type(self._rules.of(sampling))
            if request.draft.is_tree and not rule.capabilities.trees:
                refused[i] = f"acceptance rule {rule.__name__} judges chains only, and the drafter proposed a tree"
            elif not rule.capabilities.sampling and not sampling.is_greedy:
                refused[i] = f"acceptance rule {rule.__name__} serves temperature 0 only"
        return refused

    def _uniforms(self, seq_ids: Sequence[int], roots: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """float64 [2, M], per row: the uniform of the node that the row follows (unused for row 0), and that of a
        depth."""
        seeds = self._sampler.seeds(seq_ids)
        within = [row for size in sizes for row in range(size)]
        depths = [root + row for root, row in zip(roots, within, strict=True)]
        positions, indices = np.array([roots, depths]), np.array([within, [0] * len(within)])
        return uniforms(seeds, np.array([[ACCEPT], [SAMPLE]]), positions, indices)

    def _views(
        self,
        target: TargetRows,
        requests: Sequence[DraftedRequest],
        judged: Sequence[int],
        starts: Sequence[int],
        draws: np.ndarray,
    ) -> list[VerifyRequest]:
        views = []
        for i in judged:
            start, end = starts[i], starts[i + 1]
            view = VerifyRequest(
                draft=requests[i].draft,
                target=RequestRows(target, start, end),
                sampling=self._sampler.sampling(requests[i].seq_id),
                accept_uniforms=draws[0, start + 1 : end],
                recover_uniforms=draws[1, start:end],
            )
            views.append(view)
        return views

    def _judge(
        self, views: Sequence[VerifyRequest], judged: Sequence[int], faults: dict[int, str]
    ) -> list[Verdict | None]:
        """Verdicts on `views`, those of requests `judged`; None where the rule gave no usable one, with the reason in
        `faults`."""
        by_rule: dict[str | None, list[int]] = {}
        for place, view in enumerate(views):
            by_rule.setdefault(view.sampling.acceptance, []).append(place)
        verdicts: list[Verdict | None] = [None] * len(views)
        for places in by_rule.values():
            rule = self._rules.of(views[places[0]].sampling)
            found = self._judge_with(rule, [views[at] for at in places], [judged[at] for at in places], faults)
            for place, verdict in zip(places, found, strict=True):
                verdicts[place] = verdict
        return verdicts

    def _judge_with(
        self, rule: AcceptanceRule, views: Sequence[VerifyRequest], judged: Sequence[int], faults: dict[int, str]
    ) -> list[Verdict | None]:
        """As `_judge`, of requests of one rule."""
        name = type(rule).__name__
        try:
            verdicts = list(rule.verify(views))
            if len(verdicts) != len(views):
                raise ValueError(f"{len(verdicts)} verdicts for {len(views)} requests")
        except Exception as error:  # a rule is a plugin; its fault costs the drafts that it judged, and no more
            faults |= dict.fromkeys(judged, f"acceptance rule {name} failed: {type(error).__name__}: {error}")
            return [None] * len(judged)
        checked: list[Verdict | None] = []
        for i, view, verdict in zip(judged, views, verdicts, strict=True):
            try:
                checked.append(checked_verdict(verdict, view.draft, self._sampler.vocab_size))
            except Exception as error:  # a sequence of the plugin's own may raise anything
                faults[i] = f"acceptance rule {name} gave a verdict that cannot be: {error}"
                checked.append(None)
        return checked


def draft_paths(draft: Draft) -> list[list[int]]:
    """For each of the k + 1 rows of a draft, the draft tokens that lead to it: none to row 0, to row i + 1 those
    from the root down to node i."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.token_ids, draft.parent_indices, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def first_nodes(draft: Draft, count: int) -> Draft:
    """The draft cut to its first `count` nodes, which hold the parents of each other."""
    if count >= len(draft.token_ids):
        return draft
    parents = None if draft.parents is None else draft.parents[:count]
    probs = None if draft.probs is None else draft.probs[:count]
    confidence = None if draft.confidence is None else draft.confidence[:count]
    return Draft(draft.token_ids[:count], parents, probs, confidence, draft.from_prediction)
