"""What the host does about a plugin that is slow, or never comes back."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from dovetail.config.resolved import Component
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarCapabilities, GrammarSetup, Matcher
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.worker.sampling import grammar_compiler
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler

DEADLINE_S = 60


class Nothing(CompiledGrammar):
    """Compiled."""

    def start(self) -> Matcher:
        raise NotImplementedError


class Hanging(Grammar):
    """Compiles what is none of its `hangs` at once, and those when it is let go."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = GrammarCapabilities(forms=frozenset({"regex"}))
    created = threading.Event()
    goes_on = threading.Event()

    def __init__(self, options: PluginOptions, setup: GrammarSetup):
        super().__init__(options, setup)
        self.created.set()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.source.startswith("hangs"):
            self.goes_on.wait()
        return Nothing()


def spec(source: str) -> GrammarSpec:
    return GrammarSpec(form="regex", source=source)


def create(wait_s: float, *, reads_ahead: bool = False) -> GrammarCompiler:
    component = Component("grammar", "hanging", f"{__name__}:Hanging")
    setup = GrammarSetup(vocab_size=2, eos_token_ids=(1,), tokenizer_json=None)
    return GrammarCompiler(component, setup, wait_s, reads_ahead)


@pytest.fixture(autouse=True)
def hanging() -> Iterator[type[Hanging]]:
    Hanging.created.clear()
    Hanging.goes_on.clear()
    yield Hanging
    Hanging.goes_on.set()


def refusal(compiler: GrammarCompiler, source: str) -> str:
    return str(compiler.compile(spec(source)).exception(DEADLINE_S))


def test_what_hangs_is_refused_and_all_else_goes_on() -> None:
    compiler = create(0.5)
    for index in range(3):  # more than are compiled at a time
        with pytest.raises(RequestError, match=r"'hanging' has not compiled .* in 0\.5 seconds.*grammar\.wait_seconds"):
            compiler.compile(spec(f"hangs{index}")).result(DEADLINE_S)
    compiler.wait_s = DEADLINE_S
    assert isinstance(compiler.compile(spec("a")).result(DEADLINE_S), Nothing)


def test_what_hangs_is_not_begun_again_until_it_ends(hanging: type[Hanging]) -> None:
    compiler = create(0.5)
    while not compiler._hanging:  # one that did not even begin does not count
        first = compiler.compile(spec("hangs"))
        assert isinstance(first.exception(DEADLINE_S), RequestError)
    assert compiler.compile(spec("hangs")) is first
    compiler.wait_s = DEADLINE_S
    hanging.goes_on.set()
    while (again := compiler.compile(spec("hangs"))) is first:
        pass
    assert isinstance(again.result(DEADLINE_S), Nothing)


def test_where_many_hang_no_other_begins() -> None:
    compiler = create(0.05)
    numbers = itertools.count()
    while len(compiler._hanging) < grammar_compiler._MOST_HANGING:  # one that did not even begin does not count
        refusal(compiler, f"hangs{next(numbers)}")
    assert "'hanging' hangs in 8 grammars" in refusal(compiler, "a")


def test_one_that_waits_for_its_turn_too_long_is_refused_and_never_begun(hanging: type[Hanging]) -> None:
    compiler = create(0.5)
    futures = [compiler.compile(spec(f"hangs{index}")) for index in range(4)]
    assert all(isinstance(future.exception(DEADLINE_S), RequestError) for future in futures)
    compiler.wait_s = DEADLINE_S
    assert isinstance(compiler.compile(spec("a")).result(DEADLINE_S), Nothing)


def compiling_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("dovetail-grammar")}


def test_the_plugin_is_created_ahead_where_that_is_asked_for(hanging: type[Hanging]) -> None:
    before = compiling_threads()
    create(1).read_ahead()
    assert compiling_threads() <= before
    ahead = create(1, reads_ahead=True)
    ahead.read_ahead()
    assert hanging.created.wait(DEADLINE_S)
    there = pickle.loads(pickle.dumps(ahead))
    assert (there.wait_s, there.reads_ahead) == (1, True)
