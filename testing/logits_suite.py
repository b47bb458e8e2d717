"""Conformance suite of logits processors. A third party's test is a subclass::

    from dovetail.testing import LogitsProcessorSuite

    class TestMyProcessor(LogitsProcessorSuite):
        plugin = MyProcessor
        request_options = ({"ban": [3]},)  # values of SamplingParams.processors[NAME] that a request may give
        refused_options = ("ban",)  # and such as `validate` must refuse

What a row gets depends on its request and on the tokens before it, and on nothing else. So the oracle is the processor
itself: a new one that is shown that row alone.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.sampling import SamplingParams
from dovetail.testing.suite import PluginSuite

Row = tuple[int, list[int]]
"""A sequence's number, and its output up to the row."""


class LogitsProcessorSuite(PluginSuite):
    """Tests of every logits processor."""

    kind: ClassVar[str] = "logits_processor"
    plugin: ClassVar[type[LogitsProcessor]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the processor in the config."""
    request_options: ClassVar[Sequence[Any]] = (None,)
    """What requests give for the processor; None for a request that does not name it."""
    refused_options: ClassVar[Sequence[Any]] = ()
    """What `validate` refuses."""
    setup: ClassVar[LogitsSetup] = LogitsSetup(vocab_size=64, eos_token_ids=(1, 2), tokenizer_json=None)

    @pytest.fixture
    def processor(self) -> LogitsProcessor:
        """As the host creates it."""
        return self.create()

    def create(self) -> LogitsProcessor:
        """A processor without requests."""
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), self.setup)

    def text(self, seq_id: int, num_tokens: int) -> list[int]:
        """A text that repeats itself in parts, the same for each number. Override it where the processor acts on
        particular tokens: each of 16 texts should have some."""
        chooser = random.Random(seq_id)
        phrases = [[chooser.randrange(self.setup.vocab_size) for _ in range(chooser.randint(1, 4))] for _ in range(4)]
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            tokens += chooser.choice(phrases)
        return tokens[:num_tokens]

    def test_says_which_requests_it_wants(self, processor: LogitsProcessor) -> None:
        """With True or False; one of the `request_options` is wanted, or the suite would test nothing."""
        answers = [self._add(processor, number) for number in range(len(self.request_options))]
        assert {type(answer) for answer in answers} == {bool}, f"add_request returned {answers}"
        assert any(answers), "no request is wanted: give request_options that are"

    def test_changes_something(self) -> None:
        """Or the suite would test nothing."""
        before = self._logits(1)
        outcomes = [self._alone(row) for row in self._rows()]
        assert any(not torch.equal(outcome, before[0]) for outcome in outcomes), "no logit was changed: override text()"

    def test_changes_logits_in_place(self, processor: LogitsProcessor) -> None:
        """It returns nothing, and leaves shape and dtype alone."""
        rows = self._rows()
        self._add_all(processor, rows)
        logits = self._logits(len(rows))
        shape, address = logits.shape, logits.data_ptr()
        returned: object = processor.apply(logits, self._shown(rows))
        assert returned is None or returned is logits
        assert (logits.shape, logits.dtype, logits.data_ptr()) == (shape, torch.float32, address)

    def test_does_not_change_tokens(self, processor: LogitsProcessor) -> None:
        """Prompt and output belong to the host."""
        rows = self._rows()
        prompts = {seq_id: self.text(seq_id, 6) for seq_id, _ in rows}
        for seq_id, prompt in prompts.items():
            processor.add_request(self._request(seq_id, prompt))
        shown = self._shown(rows)
        processor.apply(self._logits(len(rows)), shown)
        assert prompts == {seq_id: self.text(seq_id, 6) for seq_id, _ in rows}
        assert [(row.seq_id, list(row.output_token_ids)) for row in shown] == rows

    def test_something_can_be_drawn(self) -> None:
        """No row becomes NaN, infinite or empty."""
        for row in self._rows():
            outcome = self._alone(row)
            assert not outcome.isnan().any(), f"NaN after {row[1]}"
            assert not outcome.isposinf().any(), f"an infinite logit after {row[1]}"
            assert outcome.isfinite().any(), f"no token can be drawn after {row[1]}"

    def test_masked_tokens_are_no_trouble(self, processor: LogitsProcessor) -> None:
        """Masks of the request came first: logits of minus infinity make no NaN."""
        rows = self._rows()
        self._add_all(processor, rows)
        logits = self._logits(len(rows))
        logits[:, ::3] = -torch.inf
        processor.apply(logits, self._shown(rows))
        assert not logits.isnan().any()

    def test_a_row_does_not_depend_on_other_requests(self, processor: LogitsProcessor) -> None:
        """Of a batch each row gets what it would get alone."""
        rows = self._rows()
        self._add_all(processor, rows)
        self._check(processor, rows)

    def test_rows_come_in_any_order(self, processor: LogitsProcessor) -> None:
        """Requests change their batch index from step to step, and some are left out."""
        rows = self._rows()
        self._add_all(processor, rows)
        for start in (5, 0, 3):
            self._check(processor, rows[start:] + rows[: max(0, start - 2)])

    def test_outputs_grow_by_any_number_of_tokens(self, processor: LogitsProcessor) -> None:
        """After a verify step by several; the processor is not shown the rows between."""
        seq_id = self._wanted()
        self._add(processor, seq_id)
        text = self.text(seq_id + 100, 20)
        for length in (0, 1, 2, 5, 6, 11, 20):
            self._check(processor, [(seq_id, text[:length])])

    def test_a_row_may_come_again(self, processor: LogitsProcessor) -> None:
        """A step may be computed twice."""
        row = (self._wanted(), self.text(7, 5))
        self._add(processor, row[0])
        for _ in range(3):
            self._check(processor, [row])

    def test_drafts_leave_no_trace(self, processor: LogitsProcessor) -> None:
        """A verify step shows rows after draft tokens; other tokens may be sampled in their place."""
        seq_id = self._wanted()
        self._add(processor, seq_id)
        output: list[int] = []
        for step in range(6):
            drafts = self.text(200 + step, 4)
            self._check(processor, [(seq_id, output + drafts[:ahead]) for ahead in range(5)])
            output = [*output, *drafts[: step % 3], *self.text(300 + step, 1)]

    def test_drafts_may_be_a_tree(self, processor: LogitsProcessor) -> None:
        """Rows of one request whose drafts differ, in any order."""
        seq_id = self._wanted()
        self._add(processor, seq_id)
        output = self.text(8, 5)
        paths = [self.text(400 + branch, depth) for depth in (0, 3, 1, 2) for branch in range(2)]
        self._check(processor, [(seq_id, output + path) for path in paths])

    def test_a_preempted_sequence_comes_back(self, processor: LogitsProcessor) -> None:
        """With its number, and an output that the processor may not remember."""
        rows = self._rows()
        self._add_all(processor, rows)
        self._check(processor, rows)
        seq_id, output = rows[0]
        processor.remove_request(seq_id)
        self._check(processor, rows[1:])
        self._add(processor, seq_id)
        self._check(processor, [(seq_id, [*output, 3]), *rows[1:]])

    def test_a_number_stands_for_what_came_last(self, processor: LogitsProcessor) -> None:
        """What is known of a sequence ends with `remove_request`."""
        seq_id = self._wanted()
        for prompt in (self.text(20, 9), self.text(21, 4), self.text(22, 6)):
            processor.add_request(self._request(seq_id, prompt))
            row = (seq_id, self.text(23, 3))
            outcome = self._apply(processor, [row])[0]
            assert torch.equal(outcome, self._alone(row, prompt)), "an earlier prompt of this number was remembered"
            processor.remove_request(seq_id)

    def test_sequences_of_one_prompt_are_apart(self, processor: LogitsProcessor) -> None:
        """`n` completions of a request have the prompt in common, and nothing else."""
        prompt = self.text(30, 8)
        numbers = [self._wanted() + index * len(self.request_options) for index in range(3)]
        for seq_id in numbers:
            processor.add_request(self._request(seq_id, prompt))
        for length in (1, 2, 6):
            rows = [(seq_id, self.text(500 + seq_id, length)) for seq_id in numbers]
            for row, outcome in zip(rows, self._apply(processor, rows), strict=True):
                assert torch.equal(outcome, self._alone(row, prompt)), f"sequence {row[0]} sees another's output"

    def test_engines_are_apart(self) -> None:
        """A process may have several engines, each with a processor of its own."""
        first, second = self.create(), self.create()
        seq_id = self._wanted()
        first.add_request(self._request(seq_id, self.text(40, 6)))
        second.add_request(self._request(seq_id, self.text(41, 6)))
        row = (seq_id, self.text(42, 4))
        for processor, prompt in ((first, self.text(40, 6)), (second, self.text(41, 6))):
            assert torch.equal(self._apply(processor, [row])[0], self._alone(row, prompt))

    def test_forgets_what_has_ended(self, processor: LogitsProcessor) -> None:
        """Requests come and go for months."""
        sizes = []
        for start in (0, 100, 200, 300):
            rows = [(start + seq_id, output) for seq_id, output in self._rows()]
            rows = [row for row in rows if self._add(processor, row[0])]
            self._apply(processor, rows)
            for seq_id, _ in rows:
                processor.remove_request(seq_id)
            sizes.append(_num_objects(processor))
        assert sizes[-1] <= sizes[1], f"objects that the processor holds after 16, 32, ... requests: {sizes}"

    def test_accepts_its_options(self, processor: LogitsProcessor) -> None:
        """`validate` takes what requests may give, as often as it is asked, and keeps nothing of it."""
        size = _num_objects(processor)
        for _ in range(2):
            for options in self.request_options:
                if options is not None:
                    processor.validate(options)
        assert _num_objects(processor) == size

    def test_refuses_other_options(self, processor: LogitsProcessor) -> None:
        """With a `RequestError`, before the request is accepted."""
        if not self.refused_options:
            pytest.skip(f"{self.plugin.__name__}: the test names no refused_options")
        for options in self.refused_options:
            with pytest.raises(RequestError) as caught:
                processor.validate(options)
            assert str(caught.value).strip(), f"{options!r} is refused without a reason"

    def _request(self, seq_id: int, prompt: Sequence[int]) -> LogitsRequest:
        options = self.request_options[seq_id % len(self.request_options)]
        return LogitsRequest(seq_id, prompt, SamplingParams(), options)

    def _add(self, processor: LogitsProcessor, seq_id: int) -> bool:
        return processor.add_request(self._request(seq_id, self.text(seq_id, 6)))

    def _add_all(self, processor: LogitsProcessor, rows: Sequence[Row]) -> None:
        for seq_id, _ in rows:
            self._add(processor, seq_id)

    def _wanted(self) -> int:
        """Number of a sequence that the processor wants."""
        for seq_id in range(len(self.request_options)):
            if self._add(self.create(), seq_id):
                return seq_id
        pytest.skip("no request is wanted")

    def _rows(self) -> list[Row]:
        """A row of each of 16 sequences that are wanted."""
        wanted = [seq_id for seq_id in range(len(self.request_options)) if self._add(self.create(), seq_id)]
        numbers = [seq_id + len(self.request_options) * turn for turn in range(16) for seq_id in wanted][:16]
        return [(seq_id, self.text(seq_id + 1, 3 + seq_id % 9)) for seq_id in numbers]

    def _shown(self, rows: Sequence[Row]) -> list[LogitsRow]:
        return [LogitsRow(seq_id, list(output)) for seq_id, output in rows]

    def _logits(self, num_rows: int) -> torch.Tensor:
        """The same finite logits for each row."""
        logits = torch.randn(self.setup.vocab_size, generator=torch.Generator().manual_seed(0))
        return logits.repeat(num_rows, 1)

    def _apply(self, processor: LogitsProcessor, rows: Sequence[Row]) -> torch.Tensor:
        logits = self._logits(len(rows))
        processor.apply(logits, self._shown(rows))
        return logits

    def _alone(self, row: Row, prompt: Sequence[int] | None = None) -> torch.Tensor:
        """What a new processor makes of the row: [vocab_size]."""
        processor = self.create()
        processor.add_request(self._request(row[0], self.text(row[0], 6) if prompt is None else prompt))
        return self._apply(processor, [row])[0]

    def _check(self, processor: LogitsProcessor, rows: Sequence[Row]) -> None:
        for row, outcome in zip(rows, self._apply(processor, rows), strict=True):
            expected = self._alone(row)
            changed = (outcome != expected).nonzero().flatten().tolist()
            assert not changed, (
                f"the row of sequence {row[0]} after {row[1]} differs from that of a new processor at tokens {changed}"
            )


def _num_objects(root: object) -> int:
    """Objects that `root` reaches, but for what belongs to the program: classes, modules, functions."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        for found in gc.get_referents(waiting.pop()):
            if id(found) not in seen and not isinstance(found, (type, ModuleType, FunctionType)):
                seen.add(id(found))
                waiting.append(found)
    return len(seen)
