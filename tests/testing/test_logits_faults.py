"""What the suite of logits processors finds: each a change in a processor that passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.plugin import PluginOptions
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.logits_suite import LogitsProcessorSuite


class Lowers(LogitsProcessor):
    """Lowers the logits of tokens that a text has, by as much as the request asks for."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self.prompts: dict[int, list[int]] = {}
        self.amounts: dict[int, float] = {}

    def validate(self, options: Any) -> None:
        if not isinstance(options, float):
            raise RequestError(f"lowers takes a number, got {options!r}")

    def add_request(self, request: LogitsRequest) -> bool:
        if request.options is None:
            return False
        self.prompts[request.seq_id] = list(request.prompt_token_ids)
        self.amounts[request.seq_id] = request.options
        return True

    def remove_request(self, seq_id: int) -> None:
        del self.prompts[seq_id], self.amounts[seq_id]

    def tokens(self, row: LogitsRow) -> list[int]:
        return [*self.prompts[row.seq_id], *row.output_token_ids]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for index, row in enumerate(rows):
            for token in self.tokens(row):
                logits[index, token] -= self.amounts[row.seq_id]


class TestLowers(LogitsProcessorSuite):
    plugin = Lowers
    request_options = (None, 0.5, 2.0)
    refused_options = ("much", 3)


class OneTextForAll(Lowers):
    def tokens(self, row: LogitsRow) -> list[int]:
        return [*next(iter(self.prompts.values())), *row.output_token_ids]


class ByBatchIndex(Lowers):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        if not hasattr(self, "order"):
            self.order = [row.seq_id for row in rows]
        by_index = zip(rows, self.order, strict=False)
        super().apply(logits, [LogitsRow(seq_id, row.output_token_ids) for row, seq_id in by_index])


class LearnsRowByRow(Lowers):
    """Adds the last token of each row to what it knows."""

    def tokens(self, row: LogitsRow) -> list[int]:
        self.prompts[row.seq_id] += row.output_token_ids[-1:]
        return self.prompts[row.seq_id]


class CountsRows(Lowers):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for row in rows:
            self.amounts[row.seq_id] *= 0.5
        super().apply(logits, rows)


class TakesDraftsForOutput(Lowers):
    """Keeps the longest output that it has seen."""

    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self.outputs: dict[int, list[int]] = {}

    def tokens(self, row: LogitsRow) -> list[int]:
        known = self.outputs.get(row.seq_id, [])
        if len(row.output_token_ids) > len(known):
            known = self.outputs[row.seq_id] = list(row.output_token_ids)
        return [*self.prompts[row.seq_id], *known[: len(row.output_token_ids)]]

    def remove_request(self, seq_id: int) -> None:
        super().remove_request(seq_id)
        self.outputs.pop(seq_id, None)


class OnePathOnly(Lowers):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        longest = {row.seq_id: row.output_token_ids for row in sorted(rows, key=lambda row: len(row.output_token_ids))}
        cut = [LogitsRow(row.seq_id, longest[row.seq_id][: len(row.output_token_ids)]) for row in rows]
        super().apply(logits, cut)


class RemembersAfterRemoval(Lowers):
    def add_request(self, request: LogitsRequest) -> bool:
        known = dict(self.prompts)
        wanted = super().add_request(request)
        self.prompts.update(known)
        return wanted

    def remove_request(self, seq_id: int) -> None:
        del self.amounts[seq_id]


class ForgetsOthers(Lowers):
    def remove_request(self, seq_id: int) -> None:
        self.prompts = {number: [] for number in self.prompts}


class NumbersByPrompt(Lowers):
    """One state for all sequences of a prompt."""

    texts: dict[tuple[int, ...], list[int]]

    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self.texts = {}

    def tokens(self, row: LogitsRow) -> list[int]:
        text = self.texts.setdefault(tuple(self.prompts[row.seq_id]), [])
        text[:] = [*text, *row.output_token_ids][-len(row.output_token_ids) - 3 :]
        return [*self.prompts[row.seq_id], *text]


class OneStateForAllEngines(Lowers):
    shared: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self.prompts = self.shared


class KeepsAll(Lowers):
    def __init__(self, options: PluginOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self.log: list[tuple[int, float]] = []

    def remove_request(self, seq_id: int) -> None:
        self.log.append((seq_id, self.amounts[seq_id]))
        super().remove_request(seq_id)


class ReturnsOthers(Lowers):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> Any:
        changed = logits.clone()
        super().apply(changed, rows)
        return changed


class SortsThePrompt(Lowers):
    def add_request(self, request: LogitsRequest) -> bool:
        request.prompt_token_ids.sort()  # type: ignore[attr-defined]
        return super().add_request(request)


class DividesByTheLargest(Lowers):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        super().apply(logits, rows)
        logits -= logits.min(dim=1, keepdim=True).values


class MasksAll(Lowers):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for index, row in enumerate(rows):
            if len(row.output_token_ids) > 6:
                logits[index] = -torch.inf


class SaysNothing(Lowers):
    def add_request(self, request: LogitsRequest) -> bool:
        super().add_request(request)
        return None  # type: ignore[return-value]


class RaisesItsOwn(Lowers):
    def validate(self, options: Any) -> None:
        float(options) + 1 if isinstance(options, float) else options.amount


class TakesAnything(Lowers):
    def validate(self, options: Any) -> None:
        return None


FAULTS = [
    Fault("takes the first request's text for all", OneTextForAll, "test_a_row_does_not_depend_on_other_requests"),
    Fault("goes by the batch index", ByBatchIndex, "test_rows_come_in_any_order"),
    Fault("learns one token a row", LearnsRowByRow, "test_outputs_grow_by_any_number_of_tokens"),
    Fault("counts rows in place of tokens", CountsRows, "test_a_row_may_come_again"),
    Fault("takes drafts for output", TakesDraftsForOutput, "test_drafts_leave_no_trace"),
    Fault("knows one path of a tree", OnePathOnly, "test_drafts_may_be_a_tree"),
    Fault("remembers after the removal", RemembersAfterRemoval, "test_a_number_stands_for_what_came_last"),
    Fault("forgets others", ForgetsOthers, "test_a_preempted_sequence_comes_back"),
    Fault("has one state for a prompt", NumbersByPrompt, "test_sequences_of_one_prompt_are_apart"),
    Fault("has one state for all engines", OneStateForAllEngines, "test_engines_are_apart"),
    Fault("keeps all that ended", KeepsAll, "test_forgets_what_has_ended"),
    Fault("returns other logits", ReturnsOthers, "test_changes_logits_in_place"),
    Fault("sorts the prompt", SortsThePrompt, "test_does_not_change_tokens"),
    Fault("makes NaN of masked tokens", DividesByTheLargest, "test_masked_tokens_are_no_trouble"),
    Fault("masks everything", MasksAll, "test_something_can_be_drawn"),
    Fault("does not say what it wants", SaysNothing, "test_says_which_requests_it_wants"),
    Fault("raises errors of its own", RaisesItsOwn, "test_refuses_other_options"),
    Fault("takes any options", TakesAnything, "test_refuses_other_options"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_processor_that(fault: Fault) -> None:
    check_fault(
        fault,
        LogitsProcessorSuite,
        plugin=fault.plugin,
        request_options=TestLowers.request_options,
        refused_options=TestLowers.refused_options,
    )
