"""Beam search over the engine's step loop. Every round runs the live beams as sequences of one more token each,
forked from the beams that they continue, so that they share KV blocks and copy only on write."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import BeamSearchOutput, BeamSearchSequence
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
from dovetail.contracts.step import TokenLogprobs
from dovetail.engine.engine import LLMEngine
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.sequence import Sequence


@dataclass(frozen=True)
class _Beam:
    """A hypothesis: its tokens, and the sequence whose blocks hold all but the last of them."""

    token_ids: list[int]
    cum_logprob: float
    num_output_tokens: int
    parent: Sequence | None


class BeamSearch:
    """Beam search for one prompt at a time."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams, lora_request: LoRARequest | None = None):
        """`lora_request`: an adapter that is loaded. Raises `RequestError`."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"beam_search takes BeamSearchParams(beam_width=...), got {type(params).__name__}")
        self._lora_request = lora_request
        self._engine = engine
        self._params = params
        temperature = params.temperature or 1.0
        if temperature != 1.0:
            raise RequestError(
                "beam search ranks by the model's own log probabilities: temperature must be 0 or 1, not"
                f" {params.temperature}"
            )
        self._sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 * params.beam_width,
            speculation="off",
        )

    def run(self, prompt: Prompt) -> BeamSearchOutput:
        """The best `beam_width` hypotheses, best first. Raises `RequestError` for a prompt that cannot be served."""
        engine, params = self._engine, self._params
        if engine.has_unfinished_requests():
            raise RequestError("beam search drives the engine by itself: finish or abort the other requests first")
        if params.beam_width > engine.config.model.max_completions:
            raise RequestError(
                f"beam_width is {params.beam_width}, and model.max_completions allows"
                f" {engine.config.model.max_completions}: ask for fewer beams, or raise it"
            )
        # The search's own log probabilities are not a user's, whom model.max_logprobs limits.
        processed = engine.process_input(prompt, replace(self._sampling, logprobs=None))
        processed = replace(processed, lora_request=self._lora_request)
        max_tokens = min(params.max_tokens, engine.config.model.max_model_len - len(processed.token_ids))
        beams = [_Beam(processed.token_ids, 0.0, 0, None)]
        done: list[tuple[_Beam, str]] = []
        parents: list[Sequence] = []
        sequences: list[Sequence] = []
        try:
            for length in range(1, max_tokens + 1):
                sequences = [self._start(processed, beam) for beam in beams]
                expansions = self._step_until_done(sequences)
                self._release(parents)
                parents = sequences
                beams, ended = self._select(self._expand(beams, sequences, expansions))
                done += [(beam, "stop") for beam in ended]
                if not beams or self._is_decided(beams, done, length, max_tokens):
                    break
            done += [(beam, "length") for beam in beams]
        finally:
            self._release([*parents, *sequences])
        return self._output(done)

    def _start(self, processed: ProcessedInput, beam: _Beam) -> Sequence:
        processed = replace(
            processed, params=self._sampling, token_ids=beam.token_ids, max_total_tokens=len(beam.token_ids) + 1
        )
        sequence = self._engine.create_sequence("beam", processed, beam.parent)
        sequence.retain_blocks = True
        self._engine.core.add(sequence)
        return sequence

    def _release(self, sequences: list[Sequence]) -> None:
        """Frees what the sequences hold, also of those that an error or Ctrl-C left unfinished."""
        for sequence in sequences:
            sequence.retain_blocks = False
        try:
            self._engine.core.finish_all(sequences)
        finally:
            self._engine.core.release_retained(sequences)

    def _step_until_done(self, sequences: list[Sequence]) -> list[TokenLogprobs]:
        """Runs each of `sequences` to its token; their log probabilities, in order."""
        found: dict[int, TokenLogprobs] = {}
        while step := self._engine.core.step():
            for _, ending in step.endings:
                if ending.error is not None:
                    raise RequestError(f"beam search failed: {ending.error}")
            for index, logprobs in step.result.logprobs.items():
                found[step.schedule.requests[index].seq_id] = logprobs[0]
            self._engine.tokens.kv_events.publish()
        return [found[sequence.seq_id] for sequence in sequences]

    def _expand(
        self, beams: list[_Beam], sequences: list[Sequence], expansions: list[TokenLogprobs]
    ) -> list[tuple[float, int, _Beam]]:
        """Each beam's likeliest continuations: (cumulative log probability, token, beam)."""
        candidates = []
        for beam, sequence, expansion in zip(beams, sequences, expansions, strict=True):
            for token, logprob in zip(expansion.top_ids, expansion.top_logprobs, strict=True):
                total = beam.cum_logprob + logprob
                candidates.append(
                    (total, token, _Beam([*beam.token_ids, token], total, beam.num_output_tokens + 1, sequence))
                )
        return candidates

    def _select(self, candidates: list[tuple[float, int, _Beam]]) -> tuple[list[_Beam], list[_Beam]]:
        """Of the best 2 x beam_width candidates, those that go on (at most beam_width) and those that end. A candidate
        that ends counts only among the best beam_width, as in transformers."""
        width = self._params.beam_width
        eos = () if self._params.ignore_eos else self._engine.config.model.eos_token_ids
        live: list[_Beam] = []
        ended: list[_Beam] = []
        for rank, (_, token, beam) in enumerate(heapq.nlargest(2 * width, candidates, key=lambda c: c[0])):
            if token in eos:
                if rank < width:
                    ended.append(beam)
            elif len(live) < width:
                live.append(beam)
        return live, ended

    def _is_decided(self, beams: list[_Beam], done: list[tuple[_Beam, str]], length: int, max_tokens: int) -> bool:
        """Whether no live beam can overtake the finished ones: its sum only falls, but a length penalty may lift it."""
        width = self._params.beam_width
        if len(done) < width:
            return False
        penalty = self._params.length_penalty
        best_length = max_tokens if penalty > 0 else length
        attainable = max(beam.cum_logprob for beam in beams) / best_length**penalty
        return attainable <= heapq.nlargest(width, (self._score(beam) for beam, _ in done))[-1]

    def _score(self, beam: _Beam) -> float:
        return beam.cum_logprob / max(beam.num_output_tokens, 1) ** self._params.length_penalty

    def _output(self, done: list[tuple[_Beam, str]]) -> BeamSearchOutput:
        ranked = sorted(done, key=lambda entry: self._score(entry[0]), reverse=True)
        return BeamSearchOutput([self._sequence(*entry) for entry in ranked[: self._params.beam_width]])

    def _sequence(self, beam: _Beam, finish_reason: str) -> BeamSearchSequence:
        tokens = beam.token_ids[len(beam.token_ids) - beam.num_output_tokens :]
        if finish_reason == "stop" and not self._params.include_stop_str_in_output:
            tokens = tokens[:-1]
        tokenizer = self._engine.tokenizer
        text = tokenizer.decode(tokens) if tokenizer is not None else ""
        return BeamSearchSequence(beam.token_ids, beam.cum_logprob, self._score(beam), text, finish_reason)
