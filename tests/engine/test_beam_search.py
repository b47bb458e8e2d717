"""Beam search against a plain one over transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, BeamSearchParams, LLMEngine, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.contracts.outputs import BeamSearchOutput

LogProbs = Callable[[list[int]], Any]
PROMPT = [5, 17, 99, 42, 8, 61, 23]


def brute_force(
    log_probs: LogProbs, prompt: list[int], width: int, length: int, penalty: float, eos: int | None
) -> list[tuple[list[int], float, str]]:
    """(tokens, score, how it ended), best first: no cache, no early end, every hypothesis scored anew."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[list[int], float, str]] = []
    for _ in range(length):
        candidates = [
            (total + logprob, [*tokens, token])
            for total, tokens in live
            for token, logprob in enumerate(log_probs(prompt + tokens)[-1].tolist())
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        live = []
        for rank, (total, tokens) in enumerate(candidates[: 2 * width]):
            if tokens[-1] == eos:
                if rank < width:
                    done.append((tokens, total / len(tokens) ** penalty, "stop"))
            elif len(live) < width:
                live.append((total, tokens))
    done += [(tokens, total / len(tokens) ** penalty, "length") for total, tokens in live]
    return sorted(done, key=lambda entry: -entry[1])[:width]


def check(output: BeamSearchOutput, prompt: list[int], expected: list[tuple[list[int], float, str]]) -> None:
    assert [beam.tokens for beam in output.sequences] == [prompt + tokens for tokens, _, _ in expected]
    assert [beam.finish_reason for beam in output.sequences] == [reason for _, _, reason in expected]
    for beam, (_, score, _) in zip(output.sequences, expected, strict=True):
        assert beam.score == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_equals_brute_force(
    make_llm: Callable[..., LLM],
    hf_log_probs: LogProbs,
    check_nothing_is_held: Callable[[LLMEngine], None],
    width: int,
) -> None:
    llm = make_llm()
    prompts = [PROMPT, [7]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=6))
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, prompt, brute_force(hf_log_probs, prompt, width, 6, 1.0, None))
    check_nothing_is_held(llm.engine)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
def test_end_of_sequence_and_length_penalty(
    make_llm: Callable[..., LLM], hf_log_probs: LogProbs, penalty: float
) -> None:
    # The likeliest continuation's third token ends a hypothesis, so that some end early and some do not.
    eos = brute_force(hf_log_probs, PROMPT, 3, 3, 1.0, None)[0][0][2]
    llm = make_llm(model={"hf_overrides": {"eos_token_id": eos}})
    params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=penalty)
    expected = brute_force(hf_log_probs, PROMPT, 3, 7, penalty, eos)
    assert "stop" in [reason for _, _, reason in expected] or penalty > 1
    check(llm.beam_search([PROMPT], params)[0], PROMPT, expected)
    through = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=penalty, ignore_eos=True)
    check(llm.beam_search([PROMPT], through)[0], PROMPT, brute_force(hf_log_probs, PROMPT, 3, 7, penalty, None))


def test_beams_that_do_not_fit_take_turns(make_llm: Callable[..., LLM], hf_log_probs: LogProbs) -> None:
    llm = make_llm(cache={"num_blocks": 12, "prefix_caching": False}, model={"max_model_len": 40})
    output = llm.beam_search([PROMPT], BeamSearchParams(beam_width=6, max_tokens=8))[0]
    check(output, PROMPT, brute_force(hf_log_probs, PROMPT, 6, 8, 1.0, None))


def test_the_model_length_ends_beams(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model={"max_model_len": 10})
    output = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=50))[0]
    assert [len(beam.tokens) for beam in output.sequences] == [10, 10]


def test_beams_share_blocks(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(cache={"prefix_caching": False})
    llm.beam_search([list(range(3, 33))], BeamSearchParams(beam_width=4, max_tokens=4))
    statistics = llm.engine.cache_statistics()
    # Rounds two to four fork four beams each from one with at least the prompt computed.
    assert statistics.prefix_hit_tokens >= 3 * 4 * 30
    assert statistics.num_copied_blocks > 0


def test_text_of_beams(make_stories: Callable[..., LLM]) -> None:
    llm = make_stories()
    beams = llm.beam_search(["Once upon a time"], BeamSearchParams(beam_width=3, max_tokens=8))[0].sequences
    assert len({beam.text for beam in beams}) == 3
    assert beams[0].text.startswith(", there was")
    assert beams[0].score >= beams[1].score >= beams[2].score


FAILING = """
from dovetail.attention_backends.sdpa import SDPABackend

class Failing(SDPABackend):
    steps = 0

    def plan(self, batch):
        Failing.steps += 1
        if Failing.steps == 3:
            raise {error}
        super().plan(batch)
"""


@pytest.mark.parametrize(
    ("error", "expected"), [("OSError('no')", RequestError), ("KeyboardInterrupt", KeyboardInterrupt)]
)
def test_an_end_in_the_middle_leaves_nothing_behind(
    make_llm: Callable[..., LLM],
    check_nothing_is_held: Callable[[LLMEngine], None],
    tmp_path: Path,
    error: str,
    expected: type[BaseException],
) -> None:
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING.format(error=error))
    llm = make_llm(attention=f"{plugin}:Failing")
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    with pytest.raises(expected):
        llm.beam_search([PROMPT], params)
    check_nothing_is_held(llm.engine)
    assert len(llm.beam_search([PROMPT], params)[0].sequences) == 3


def test_refusals(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match=r"takes BeamSearchParams\(beam_width=...\), got SamplingParams"):
        llm.beam_search([[5]], SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"temperature must be 0 or 1, not 0\.5"):
        llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.5))
    with pytest.raises(RequestError, match="beam_width must be at least 1"):
        BeamSearchParams(beam_width=0, max_tokens=2)
    with pytest.raises(RequestError, match="the prompt has 256 tokens"):
        llm.beam_search([[5] * 256], BeamSearchParams(beam_width=2, max_tokens=2))
    llm.engine.add_request("other", [5], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="finish or abort the other requests first"):
        llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=2))
    llm.engine.abort_request("other")


def test_a_salt_keeps_the_beams_of_a_prompt_apart(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt, params = list(range(3, 33)), BeamSearchParams(beam_width=2, max_tokens=2)
    llm.beam_search({"prompt_token_ids": prompt, "cache_salt": "alice"}, params)
    once = SamplingParams(temperature=0, max_tokens=1)
    assert llm.generate(prompt, once)[0].num_cached_tokens == 0
    assert llm.generate({"prompt_token_ids": prompt, "cache_salt": "alice"}, once)[0].num_cached_tokens == 28
