"""From updates of tokens to `RequestOutput`: incremental text, stop strings, log probabilities, several completions of
one prompt under one request. It runs where the text is wanted, which need not be the engine's process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.kv_connector import TRANSFER_PARAMS
from dovetail.contracts.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    Span,
)
from dovetail.contracts.pooling_params import PooledStates
from dovetail.contracts.step import TokenLogprobs
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.step_update import SequenceEnd, StepUpdate, TextStop
from dovetail.engine.tokenization.detokenizer import Detokenizer, create_detokenizer
from dovetail.engine.tokenization.stop_strings import StopChecker
from dovetail.engine.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionRecord:
    """One completion while it grows."""

    seq_id: int
    index: int
    detokenizer: Detokenizer | None
    stop: StopChecker | None
    token_ids: list[int] = field(default_factory=list)
    """The output."""
    num_seen: int = 0
    """Output tokens that were detokenized."""
    num_sent: int = 0
    """Output tokens that a "delta" output carried."""
    text: str = ""
    """Text that is safe to show: it cannot become part of a stop string any more."""
    chars_sent: int = 0
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    accepted_spans: list[Span] | None = None
    """Output tokens that are accepted drafts; of a completion that streams "delta" outputs, those of the next one.
    None: there are none."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_over: bool = False
    """The engine has ended it. After a stop string that takes another update."""
    end_sent: bool = False

    @property
    def has_news(self) -> bool:
        """Whether there is something that no output carried."""
        is_over = self.is_over and not self.end_sent
        return len(self.token_ids) > self.num_sent or len(self.text) > self.chars_sent or is_over


@dataclass(slots=True)
class RequestRecord:
    """One request: its prompt and its completions."""

    request_id: str
    input: ProcessedInput
    metrics: RequestMetrics
    weight_version: int
    weight_checksum: str
    completions: list[CompletionRecord] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_open: int = 0
    """Completions that have not ended."""
    error: str | None = None
    pooled: PooledStates | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion ended."""
        return self.num_open == 0


class OutputProcessor:
    """Owns the text of requests from acceptance to their last output."""

    def __init__(self, tokenizer: Tokenizer | None, transfer_params: Mapping[str, Any] | None = None):
        """`transfer_params`: the engine's (`EngineFacts.kv_transfer_params`)."""
        self._tokenizer = tokenizer
        self._transfer_params = transfer_params or None
        self._requests: dict[str, RequestRecord] = {}
        self._by_seq_id: dict[int, tuple[RequestRecord, CompletionRecord]] = {}
        """Completions that have not ended."""

    def add(
        self,
        request_id: str,
        processed: ProcessedInput,
        seq_ids: list[int],
        metrics: RequestMetrics,
        weight_version: int,
        weight_checksum: str,
    ) -> None:
        """Takes in an accepted request with one sequence per completion, which these weights compute."""
        params = processed.params
        record = RequestRecord(request_id, processed, metrics, weight_version, weight_checksum, num_open=len(seq_ids))
        for index, seq_id in enumerate(seq_ids):
            completion = CompletionRecord(
                seq_id,
                index,
                self._create_detokenizer(processed),
                StopChecker(tuple(params.stop), params.include_stop_str_in_output) if params.stop else None,
            )
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            record.completions.append(completion)
            self._by_seq_id[seq_id] = record, completion
        if params.prompt_logprobs is not None:
            record.prompt_logprobs = [None]
        self._requests[request_id] = record

    def drop(self, request_id: str) -> None:
        """Forgets a request: it gets no last output. Unknown ids are ignored."""
        record = self._requests.pop(request_id, None)
        for completion in record.completions if record is not None else ():
            self._by_seq_id.pop(completion.seq_id, None)

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Forgets all other requests: they ended without a last output."""
        for request_id in self._requests.keys() - set(request_ids):
            self.drop(request_id)

    def clear(self) -> None:
        """Forgets all requests."""
        self.keep_only(())

    def process(self, update: StepUpdate) -> tuple[list[RequestOutput], list[TextStop]]:
        """The outputs of an update, and the sequences that a stop string ended (for the engine to end them too)."""
        touched: dict[str, RequestRecord] = {}
        stops: list[TextStop] = []
        ends = {end.seq_id: end for end in update.ends if end.seq_id in self._by_seq_id}
        for request_id, metrics in update.metrics.items():
            if request_id in self._requests:
                self._requests[request_id].metrics = metrics
        if update.logprobs or update.prompt_logprobs:
            self._take_logprobs(update, ends)
        if update.accepted_spans:
            self._take_spans(update.accepted_spans)
        self._take_tokens(update, ends, touched, stops)
        for end in ends.values():
            record, completion = self._by_seq_id[end.seq_id]
            self._take_end(record, completion, end)
            touched[record.request_id] = record
        return self._outputs(touched.values()), stops

    def _outputs(self, records: Iterable[RequestRecord]) -> list[RequestOutput]:
        outputs = []
        for record in records:
            if record.finished:
                self._requests.pop(record.request_id, None)
                outputs.append(self._output(record))
            elif record.input.streams:
                outputs.append(self._output(record))
        return outputs

    def _create_detokenizer(self, processed: ProcessedInput) -> Detokenizer | None:
        params = processed.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return create_detokenizer(
            self._tokenizer,
            processed.token_ids,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_tokens=params.kept_special_tokens,
        )

    def _take_tokens(
        self,
        update: StepUpdate,
        ends: dict[int, SequenceEnd],
        touched: dict[str, RequestRecord],
        stops: list[TextStop],
    ) -> None:
        """Appends new tokens, and makes text of those of sequences that go on."""
        tokens, by_seq_id, start = update.token_ids, self._by_seq_id, 0
        counts = update.counts
        for index, seq_id in enumerate(update.seq_ids):
            count = 1 if counts is None else counts[index]
            found = by_seq_id.get(seq_id)
            if found is not None and count and found[1].finish_reason is None:
                record, completion = found
                if count == 1:
                    completion.token_ids.append(tokens[start])
                else:
                    completion.token_ids += tokens[start : start + count]
                if seq_id not in ends:
                    touched[record.request_id] = record
                    if self._advance(completion, record.input, None):
                        num_tokens = len(completion.token_ids)
                        stops.append(TextStop(seq_id, str(completion.stop_reason), num_tokens))
            start += count

    def _take_logprobs(self, update: StepUpdate, ends: dict[int, SequenceEnd]) -> None:
        for seq_id, logprobs in update.logprobs.items():
            found = self._by_seq_id.get(seq_id)
            if found is None or found[1].finish_reason is not None:
                continue
            record, completion = found
            if completion.logprobs is not None and completion.cumulative_logprob is not None:
                # Tokens behind one that ended the sequence do not count.
                count = ends[seq_id].num_output_tokens - len(completion.logprobs) if seq_id in ends else None
                for entry in logprobs[:count]:
                    completion.logprobs.append(self._position(entry, record.input.params.detokenize))
                    completion.cumulative_logprob += entry.logprob
        for request_id, (position, entries) in update.prompt_logprobs.items():
            record_ = self._requests.get(request_id)
            if record_ is not None and record_.prompt_logprobs is not None:
                # A prompt that starts over after a preemption, or a sibling's, brings positions that are known.
                known = len(record_.prompt_logprobs) - position
                shows_text = record_.input.params.detokenize
                record_.prompt_logprobs.extend(self._position(entry, shows_text) for entry in entries[known:])

    def _take_spans(self, accepted: Mapping[int, list[Span]]) -> None:
        for seq_id, spans in accepted.items():
            found = self._by_seq_id.get(seq_id)
            if found is not None and found[1].finish_reason is None:
                completion = found[1]
                completion.accepted_spans = completion.accepted_spans or []
                completion.accepted_spans += spans

    def _position(self, entry: TokenLogprobs, shows_text: bool) -> PositionLogprobs:
        text, mass = self._decoded(entry.token_id, shows_text), entry.surviving_mass
        position = {entry.token_id: Logprob(entry.logprob, entry.rank, text, mass)}
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            if token not in position:
                position[token] = Logprob(logprob, rank, self._decoded(token, shows_text), mass)
        return position

    def _decoded(self, token: int, shows_text: bool) -> str | None:
        if self._tokenizer is None or not shows_text:
            return None
        return self._tokenizer.token_text(token)

    def _advance(self, completion: CompletionRecord, request: ProcessedInput, end: SequenceEnd | None) -> bool:
        """Turns new tokens into text. True if a stop string ended the completion just now."""
        start = completion.num_seen
        tokens = completion.token_ids[start:]
        completion.num_seen += len(tokens)
        if completion.detokenizer is None:
            return False
        if end is not None and end.finish_reason == "stop" and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the token that ended it is no text
        if completion.stop is not None:
            return self._advance_to_stop(completion, request.params.min_tokens, start, tokens, end)
        completion.text += completion.detokenizer.push(tokens)
        if end is not None:
            completion.text += completion.detokenizer.finish()
        return False

    def _advance_to_stop(
        self, completion: CompletionRecord, first_checked: int, start: int, tokens: list[int], end: SequenceEnd | None
    ) -> bool:
        """As `_advance`, token by token, so that nothing behind a stop string is kept. `tokens` begin at `start`.

        A stop string may begin in the first `first_checked` tokens, but not end there."""
        stop, detokenizer = completion.stop, completion.detokenizer
        assert stop is not None
        assert detokenizer is not None
        match = None
        for position, token in enumerate(tokens, start):
            match = stop.push(detokenizer.push([token]), may_stop=position >= first_checked)
            if match is not None:
                _cut(completion, position + 1)
                break
        if match is None and end is not None:
            match = stop.push(detokenizer.finish(), may_stop=len(completion.token_ids) > first_checked)
        if match is not None:
            completion.finish_reason, completion.stop_reason = "stop", match
        completion.text = stop.text if end is not None or match is not None else stop.safe_text
        return match is not None

    def _take_end(self, record: RequestRecord, completion: CompletionRecord, end: SequenceEnd) -> None:
        if completion.finish_reason is None:
            if end.token_ids is not None:
                completion.token_ids = end.token_ids
                completion.accepted_spans = end.accepted_spans or None
            del completion.token_ids[end.num_output_tokens :]
            self._advance(completion, record.input, end)
        if completion.finish_reason is None:
            completion.finish_reason, completion.stop_reason = end.finish_reason, end.stop_reason
            record.error = record.error or end.error
            record.pooled = end.pooled
        record.metrics.num_generated_tokens -= end.num_output_tokens - len(completion.token_ids)
        completion.is_over = True
        del self._by_seq_id[completion.seq_id]
        record.num_open -= 1

    def _output(self, record: RequestRecord) -> RequestOutput:
        params, finished = record.input.params, record.finished
        completions: Iterable[CompletionRecord] = record.completions
        if finished and params.num_sequences > params.n:
            ranked = sorted(record.completions, key=_mean_logprob, reverse=True)
            completions = ranked[: params.n]
        is_delta = params.output_kind == "delta"
        outputs = [
            self._completion(c, index, record.input.shows_logprobs, is_delta)
            for index, c in enumerate(completions)
            if not is_delta or c.has_news
        ]
        return RequestOutput(
            request_id=record.request_id,
            prompt=record.input.prompt,
            prompt_token_ids=record.input.token_ids,
            outputs=outputs,
            finished=finished,
            metrics=record.metrics,
            prompt_logprobs=record.prompt_logprobs,
            error=record.error,
            weight_version=record.weight_version,
            weight_checksum=record.weight_checksum,
            lora_request=record.input.lora_request,
            is_delta=is_delta,
            pooled=record.pooled,
            kv_transfer_params=self._transfer_params if finished and _goes_on_elsewhere(record) else None,
        )

    def _completion(
        self, completion: CompletionRecord, index: int, shows_logprobs: bool, is_delta: bool
    ) -> CompletionOutput:
        first = completion.num_sent if is_delta else 0
        text = completion.text[completion.chars_sent :] if is_delta else completion.text
        positions = completion.logprobs if shows_logprobs else None
        output = CompletionOutput(
            index=index,
            text=text,
            token_ids=[],
            cumulative_logprob=completion.cumulative_logprob,
        )
        if completion.is_over:
            output.finish_reason, output.stop_reason = completion.finish_reason, completion.stop_reason
        stop = len(completion.token_ids)
        if is_delta or completion.is_over:
            output.token_ids = completion.token_ids[first:stop]
            output.logprobs = positions[first:] if positions is not None else None
            if completion.accepted_spans is not None:
                output.accepted_spans = [(start - first, count) for start, count in completion.accepted_spans]
                completion.accepted_spans = None
        else:
            output.defer_tokens(completion.token_ids, first, stop, positions, completion.accepted_spans or ())
        completion.num_sent = stop
        completion.chars_sent = len(completion.text)
        completion.end_sent = completion.is_over
        return output


def _mean_logprob(completion: CompletionRecord) -> float:
    """Log probability per token, by which `best_of` ranks: a sum would prefer the shortest. Without tokens it is the
    last."""
    if completion.cumulative_logprob is None or not completion.logprobs:
        return -math.inf
    return completion.cumulative_logprob / len(completion.logprobs)


def _cut(completion: CompletionRecord, num_tokens: int) -> None:
    """Drops the tokens behind the one that ended the completion, as drafts may bring some, with what is known of
    them."""
    if completion.logprobs is not None and completion.cumulative_logprob is not None:
        for entry in completion.logprobs[num_tokens:]:
            # The token of the position comes first.
            completion.cumulative_logprob -= next(iter(entry.values())).logprob
        del completion.logprobs[num_tokens:]
    if completion.accepted_spans is not None:
        completion.accepted_spans = [
            (start, min(count, num_tokens - start)) for start, count in completion.accepted_spans if start < num_tokens
        ]
    del completion.token_ids[num_tokens:]
    completion.num_seen = min(completion.num_seen, num_tokens)


def _goes_on_elsewhere(record: RequestRecord) -> bool:
    """Whether another engine is to decode what this one computed."""
    asked = record.input.params.extra.get(TRANSFER_PARAMS)
    return record.error is None and isinstance(asked, Mapping) and bool(asked.get("do_remote_decode"))
