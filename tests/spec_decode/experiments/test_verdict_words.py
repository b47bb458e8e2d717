"""Verdict words: each has a meaning, and the terminal and the page colour the same ones."""

from __future__ import annotations

import re
from io import StringIO
from typing import get_args

import pytest
from rich.console import Console

from dovetail.spec_decode.experiments import compare, families, judging, trials
from dovetail.spec_decode.experiments.load import results as load_results
from dovetail.spec_decode.experiments.page.page import section_parts
from dovetail.spec_decode.experiments.tables import Section, TableData
from dovetail.spec_decode.experiments.terminal import print_sections
from dovetail.spec_decode.experiments.verdict_words import TONES

VERDICTS = (families.Verdict, judging.Verdict, compare.Verdict, load_results.Queue, trials.Outcome)
WORDS = sorted({word for verdict in VERDICTS for word in get_args(verdict)} | {"REAL", "tie"})


def test_every_verdict_that_a_report_can_have_has_a_meaning() -> None:
    assert sorted(TONES) == WORDS


def verdict_section(word: str) -> Section:
    return Section("Any", [], [TableData(["arm", "verdict"], [["mine", word]])])


@pytest.mark.parametrize("word", WORDS)
def test_the_page_marks_every_verdict(word: str) -> None:
    html = "".join(section_parts(verdict_section(word)))
    assert f'<td>mine</td><td class="{TONES[word]}">{word}</td>' in html


@pytest.mark.parametrize("word", WORDS)
def test_the_terminal_styles_every_verdict(word: str) -> None:
    console = Console(file=StringIO(), force_terminal=True, color_system="standard", width=100)
    print_sections(console, [verdict_section(word)])
    assert isinstance(console.file, StringIO)
    assert re.search(rf"\x1b\[[0-9;]*m *{re.escape(word)}", console.file.getvalue())
