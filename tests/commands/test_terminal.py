"""`dovetail chat` and progress, as somebody at a terminal sees them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from dovetail import LLM, SamplingParams
from dovetail.contracts.outputs import TokenProgress
from dovetail.engine.progress import GenerationProgress, PromptProgress

if TYPE_CHECKING:
    from .conftest import Terminal

RATES = r"(\d+) tokens in, (\d+) out"
PROMPT = r"> $"
ANSWERING = r"(?s)\?25h.*\x1b\[2K.{3}"
"""Text behind the sequences that show the cursor again and take the line about the prompt away."""


def test_a_conversation_at_the_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("chat", "--max-tokens", "12000", "--temperature", "0")
    chat.wait_for(r"tiny-chat\w*, context of 16,384 tokens\. /help lists commands\.")
    chat.wait_for(PROMPT)
    chat.type("\r")  # an empty line asks again
    chat.wait_for(PROMPT)
    chat.type("/help\r")
    chat.wait_for("/clear +begin a new conversation")
    chat.wait_for(PROMPT)

    chat.type("hello\r")
    chat.wait_for(ANSWERING)
    chat.type("\x03")  # stops the answer, which stays in the conversation
    first_in, first_out = map(int, chat.wait_for(RATES).groups())
    assert (first_in, 0 < first_out < 12000) == (len("uhello."), True)
    chat.wait_for(PROMPT)

    chat.type("\x1b[A\x7f\x7f\x7f\r")  # the line before, edited
    chat.wait_for(ANSWERING)
    chat.type("\x03")
    second_in = int(chat.wait_for(RATES)[1])
    assert second_in == first_in + len("a.") + first_out + len("uhe.")
    chat.wait_for(PROMPT)

    chat.type("/clear\r")
    chat.wait_for("a new conversation")
    chat.wait_for(PROMPT)
    chat.type("x" * 5 + "\r")
    chat.wait_for(ANSWERING)
    chat.type("\x03")
    assert int(chat.wait_for(RATES)[1]) == len("uxxxxx.")
    chat.wait_for(PROMPT)
    chat.type("/exit\r")
    assert chat.end() == 0

    history = tmp_path / "cache" / "dovetail" / "chat_history"
    assert history.read_text().splitlines()[-4:] == ["he", "/clear", "xxxxx", "/exit"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_ends_generate_with_the_code_of_an_interrupt(terminal: Callable[..., Terminal]) -> None:
    generate = terminal("generate", "hello", "--max-tokens", "12000", "--temperature", "0")
    generate.wait_for(ANSWERING)
    generate.type("\x03")
    assert generate.end() == 130


@pytest.fixture
def screen() -> Console:
    return Console(force_terminal=True, file=io.StringIO(), width=120)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_bar_counts_tokens_before_the_first_request_is_done(screen: Console) -> None:
    with GenerationProgress(3, enabled=True, console=screen) as progress:
        progress.update(TokenProgress(num_prompt_tokens=2048, num_output_tokens=17))
    assert re.search(r"0/3.*in 2,048 tokens, \d+ tok/s; out 17, ", written(screen))


def test_the_line_for_a_long_prompt_goes_before_text_comes(screen: Console) -> None:
    with PromptProgress(9000, console=screen) as progress:
        progress.update(TokenProgress(1024, 0))
        progress.stop()
        assert "1,024 of 9,000 tokens" in written(screen)
        before = written(screen)
        progress.update(TokenProgress(2048, 0))
        assert written(screen) == before


def test_token_progress_counts_what_runs(chat_model: Path) -> None:
    with LLM(
        model={"path": str(chat_model)},
        cache={"memory_gib": 0.1},
        executor={"threads": 1},
        scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 2},
    ) as llm:
        engine = llm.engine
        engine.add_request("a", "0123456789", SamplingParams(max_tokens=4, temperature=0, n=1))
        seen = [engine.token_progress(["a", "unknown"])]
        while engine.has_unfinished_requests():
            engine.step()
            seen.append(engine.token_progress(["a"]))
    counts = [(each.num_prompt_tokens, each.num_output_tokens) for each in seen]
    assert counts == [(0, 0), (8, 0), (10, 1), (10, 2), (10, 3), (0, 0)]
