"""Masks of grammars in the sampler: rows, drafts, failures, and the matcher that begins behind a marker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.config.resolved import Component
from dovetail.contracts.grammar import GrammarSetup, Matcher
from dovetail.contracts.grammar_spec import GrammarSpec, OutputGrammar
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft
from dovetail.contracts.step import NewRequest
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.testing.acceptance_suite import chi_square_p
from dovetail.testing.grammar_cases import byte_vocabulary
from dovetail.testing.grammar_walks import bits
from dovetail.worker.sampling.delayed_matcher import DelayedMatcher
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.draft_grammar import cut_to_grammar
from dovetail.worker.speculation.rules import Rules
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier, draft_paths

VOCABULARY = byte_vocabulary()
SIZE = VOCABULARY.vocab_size
ENDS = set(VOCABULARY.end_ids)


@pytest.fixture(scope="module")
def compiler():
    component = Component("grammar", "llguidance", "dovetail.plugins.grammars.llguidance:LLGuidanceGrammar")
    setup = GrammarSetup(vocab_size=SIZE, eos_token_ids=VOCABULARY.end_ids, tokenizer_json=VOCABULARY.tokenizer_json)
    made = GrammarCompiler(component, setup, wait_s=60)
    yield made
    made.close()


def request(seq_id: int, regex: str, output: bytes = b"") -> NewRequest:
    params = SamplingParams(temperature=0)
    grammar = OutputGrammar(spec=GrammarSpec(form="regex", source=regex))
    return NewRequest(seq_id, str(seq_id), [7, *output], 1, 0, ([1],), params, 0, grammar=grammar)


def legal(sampler: Sampler, seq_ids: Sequence[int], paths: Sequence[Sequence[int]] | None = None) -> list[set[int]]:
    """Tokens that are left of each row."""
    positions = np.array([1 + len(path) for path in (paths or [()] * len(seq_ids))])
    edited, failed = sampler.edited(torch.zeros(len(seq_ids), SIZE), seq_ids, positions, paths)
    assert not failed
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in edited]


def test_only_rows_of_requests_with_a_grammar_are_masked(compiler):
    sampler = Sampler(SIZE, 3, grammars=compiler)
    sampler.add(request(1, "[ab]c"))
    sampler.add(NewRequest(2, "2", [7], 1, 0, ([1],), SamplingParams(temperature=0), 0))
    sampler.add(request(3, "x?"))
    assert legal(sampler, [3, 2, 1]) == [{ord("x")} | ENDS, set(range(SIZE)), set(b"ab")]


@pytest.mark.parametrize("starts", [True, False])
def test_each_row_of_a_tree_has_the_mask_behind_its_own_path(compiler, starts):
    sampler = Sampler(SIZE, 1, grammars=compiler)
    sampler.add(request(1, "(ab|ac|b[xy])z?"))
    paths = [[], [*b"a"], [*b"b"], [*b"ab"], [*b"by"]]
    if starts:
        sampler.start_masks([(1, paths)])
    found = legal(sampler, [1] * 5, paths)
    assert found == [set(b"ab"), set(b"bc"), set(b"xy"), {ord("z")} | ENDS, {ord("z")} | ENDS]
    assert legal(sampler, [1]) == [set(b"ab")]


WORDS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@settings(max_examples=80, deadline=None)
@given(words=WORDS, tree=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([*b"ab", *ENDS])), max_size=8))
def test_masks_and_cuts_are_those_of_all_legal_texts(compiler, words, tree):
    """Brute force over the list of texts: which tokens may follow a path, and which paths are legal at all."""
    tokens = [token for _, token in tree]
    parents = [number % (node + 1) - 1 for node, (number, _) in enumerate(tree)]
    draft = Draft(tokens, parents)
    sampler = Sampler(SIZE, 1, grammars=compiler)
    sampler.add(request(1, "|".join(words)))
    paths = draft_paths(draft)
    found = legal(sampler, [1] * len(paths), paths)
    expected = [follows(words, path) for path in paths]
    assert all(own == want for own, want in zip(found, expected, strict=True) if want is not None)
    kept = cut_to_grammar(draft, 1, sampler.grammars)
    assert draft_paths(kept)[1:] == [
        path for path, want in zip(paths[1:], expected[1:], strict=True) if want is not None
    ]


def follows(words: Sequence[str], path: Sequence[int]) -> set[int] | None:
    """Tokens that may follow; None where the path itself is not legal."""
    text = bytes(token for token in path if token not in ENDS)
    ended = len(text) < len(path)
    if ended and (list(path[: len(text)]) != list(text) or text.decode() not in words):
        return None
    if ended:
        return ENDS
    nexts = {word.encode()[len(text)] for word in words if word.encode().startswith(text) and len(word) > len(text)}
    ends = ENDS if text.decode() in words else set()
    return nexts | ends or None


def test_a_request_that_comes_back_goes_on_where_it_was(compiler):
    sampler = Sampler(SIZE, 1, grammars=compiler)
    sampler.add(request(1, "a(bc)+"))
    sampler.commit(1, [*b"ab"])
    sampler.remove(1)
    sampler.add(request(1, "a(bc)+", output=b"ab"))
    assert legal(sampler, [1]) == [{ord("c")}]
    sampler.commit(1, [*b"c"])
    assert legal(sampler, [1]) == [{ord("b")} | ENDS]


def test_a_grammar_that_cannot_be_compiled_fails_its_own_rows(compiler):
    sampler = Sampler(SIZE, 2, grammars=compiler)
    sampler.add(request(1, "(?=a)"))
    sampler.add(request(2, "a"))
    output = sampler.sample(torch.zeros(2, SIZE), [1, 2], np.array([1, 1]))
    assert list(output.failed) == [0]
    assert output.token_ids[1] == ord("a")


def test_output_that_the_grammar_does_not_take_fails_the_request(compiler):
    sampler = Sampler(SIZE, 1, grammars=compiler)
    sampler.add(request(1, "ab"))
    sampler.commit(1, [*b"x"])
    _, failed = sampler.edited(torch.zeros(1, SIZE), [1], np.array([2]))
    assert "does not take token" in failed[0]


def test_steps_with_a_grammar_are_not_deferred(compiler):
    sampler = Sampler(SIZE, 2, grammars=compiler)
    sampler.add(request(1, "ab"))
    sampler.add(NewRequest(2, "2", [7], 1, 0, ([1],), SamplingParams(temperature=0), 0))
    assert not sampler.can_defer([1, 2])
    assert sampler.can_defer([2])
    sampler.remove(1)
    assert sampler.can_defer([2])


def test_a_chain_is_cut_to_what_is_legal_and_a_tree_to_its_legal_paths(compiler):
    sampler = Sampler(SIZE, 1, grammars=compiler)
    sampler.add(request(1, "ab[cd]"))
    chain = cut_to_grammar(Draft([*b"abxc"]), 1, sampler.grammars)
    assert list(chain.token_ids) == [*b"ab"]
    tree = Draft([*b"xabbcd"], [-1, -1, 0, 1, 3, 3], confidence=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    cut = cut_to_grammar(tree, 1, sampler.grammars)
    assert (list(cut.token_ids), list(cut.parent_indices)) == ([*b"abcd"], [-1, 0, 1, 1])
    assert cut.confidence == [0.2, 0.4, 0.5, 0.6]
    assert legal(sampler, [1]) == [{ord("a")}]


def test_of_drawn_drafts_the_first_forbidden_one_is_kept(compiler):
    """It must be rejected, or the output has another distribution: of p = (1/2, 1/2, 0) a drafter that draws from
    q = (1/2, 0, 1/2) would otherwise make it (3/4, 1/4, 0)."""
    sampler = Sampler(SIZE, 1, grammars=compiler)
    sampler.add(request(1, "ab[cd]"))
    draft = Draft([*b"abxc"], probs=torch.full((4, SIZE), 1 / SIZE))
    cut = cut_to_grammar(draft, 1, sampler.grammars)
    assert list(cut.token_ids) == [*b"abx"]
    assert cut.probs is not None
    assert len(cut.probs) == 3


def test_drawn_drafts_leave_the_distribution_as_it_is(compiler):
    """p = (1/2, 1/2) of two legal tokens, and a drafter that draws half of the time one that is forbidden. A cut in
    front of those would make it (3/4, 1/4), which a thousand draws tell from it with a probability beyond 1 - 1e-12."""
    sampler = Sampler(SIZE, 1, grammars=compiler)
    verifier = Verifier(Rules(RejectionRule(PluginOptions())), sampler)
    probs = torch.zeros(1, SIZE)
    probs[0, [ord("a"), ord("x")]] = 0.5
    random = np.random.default_rng(7)
    counts = {ord("a"): 0, ord("b"): 0}
    for seed in range(1000):
        params = SamplingParams(temperature=1.0)
        asked = OutputGrammar(spec=GrammarSpec(form="regex", source="[ab][ab]"))
        sampler.add(NewRequest(1, "1", [7], 1, 0, ([1],), params, seed, grammar=asked))
        draft = cut_to_grammar(Draft([int(random.choice([*b"ax"]))], probs=probs), 1, sampler.grammars)
        num_rows = 1 + len(draft.token_ids)
        output = verifier.verify(torch.zeros(num_rows, SIZE), [DraftedRequest(1, 1, draft)])
        counts[output.token_ids[0][0]] += 1
        sampler.remove(1)
    assert chi_square_p(np.array(list(counts.values())), np.array([500.0, 500.0])) > 1e-4


def plain(matcher: Matcher) -> list[int]:
    row = np.empty(-(-SIZE // 32), np.int32)
    matcher.fill_mask(row)
    return bits(row)


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from([*b"abc<>", *ENDS]), max_size=12),
    marker=st.sampled_from([b"<", b"<a", b"aab", b"<<"]),
    back=st.integers(0, 12),
)
def test_a_delayed_matcher_is_the_inner_one_behind_the_first_marker(compiler, text, marker, back):
    compiled = compiler.compile(GrammarSpec(form="regex", source="[ab]{2}(c|<)*")).result(60)
    matcher = DelayedMatcher(compiled.start(), marker, SIZE, VOCABULARY.end_ids)
    taken = matcher.advance(text)
    back = min(back, taken)
    matcher.rollback(back)
    known = text[: taken - back]
    begin = next((i + len(marker) for i in range(len(known)) if bytes_at(known, i, marker)), None)
    if begin is None:
        assert plain(matcher) == [token for token in range(SIZE) if token not in ENDS]
        assert (matcher.may_end, matcher.is_done, matcher.forced()) == (False, False, ())
    else:
        inner = compiled.start()
        assert inner.advance(known[begin:]) == len(known) - begin
        assert plain(matcher) == plain(inner)
        assert (matcher.may_end, matcher.is_done, matcher.forced()) == (inner.may_end, inner.is_done, inner.forced())
    assert matcher.legal_prefix(text[taken - back :]) >= back


def bytes_at(tokens: Sequence[int], index: int, marker: bytes) -> bool:
    return list(tokens[index : index + len(marker)]) == list(marker)
