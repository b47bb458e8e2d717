"""Conformance suite of grammars. A third party's test is a subclass::

    from dovetail.testing import GrammarSuite

    class TestMyGrammar(GrammarSuite):
        plugin = MyGrammar

Vocabularies are made on the spot, of bytes and of pieces of words; what grammars allow is found by walks that draw
from the masks, with seeds of their own. Here is what holds for matchers of every form, with brute force as the oracle;
`grammar_forms` has what each form means.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dovetail.contracts.grammar import CompiledGrammar, Grammar
from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec
from dovetail.testing import grammar_cases as cases
from dovetail.testing.grammar_cases import Vocabulary
from dovetail.testing.grammar_forms import GrammarForms
from dovetail.testing.grammar_walks import Walk, bits, mask_of, row_size, state_of
from dovetail.testing.side_effects import leaves_alone


class GrammarSuite(GrammarForms):
    """What every grammar must do."""

    def test_the_mask_has_the_tokens_that_are_legal_one_by_one(
        self, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """Each token of the vocabulary is tried in states along walks: nothing else is legal, padding included."""
        grammar = create(vocabulary)
        for spec in self.specs().values():
            compiled = grammar.compile(spec)
            for seed in range(2):
                walk = Walk(compiled.start(), vocabulary, seed)
                for _ in range(8):
                    one_by_one = [i for i in range(vocabulary.vocab_size) if walk.matcher.legal_prefix([i])]
                    assert walk.legal() == one_by_one, walk.story(spec)
                    if not walk.step():
                        break

    def test_every_bit_of_a_row_is_written(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """Whatever it held before, and behind the vocabulary too."""
        for spec in self.specs().values():
            walk = Walk(create(vocabulary).compile(spec).start(), vocabulary, 1)
            for _ in range(6):
                rows = [np.full(row_size(vocabulary), fill, np.int32) for fill in (0, -1, 0x5A5A5A5A)]
                for row in rows:
                    walk.matcher.fill_mask(row)
                assert np.array_equal(rows[0], rows[1]), walk.story(spec)
                assert np.array_equal(rows[0], rows[2]), walk.story(spec)
                assert all(token_id < vocabulary.vocab_size for token_id in bits(rows[1])), "bits behind the vocabulary"
                assert rows[0].any(), f"an empty mask: {walk.story(spec)}"
                if not walk.step():
                    break

    def test_tokens_without_text_are_not_legal(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """Special tokens and ids that the tokenizer does not have, in states where any text may follow."""
        silent = [i for i, text in enumerate(vocabulary.token_bytes) if text is None and i not in vocabulary.end_ids]
        for spec in self.specs().values():
            walk = Walk(create(vocabulary).compile(spec).start(), vocabulary, 2)
            for _ in range(20):
                assert not set(walk.legal()) & set(silent), walk.story(spec)
                if not walk.step():
                    break

    def test_takes_what_is_legal_and_nothing_of_the_rest(
        self, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """`advance` stops before the first token that is not legal; what follows leaves no trace."""
        for spec in self.specs().values():
            compiled = create(vocabulary).compile(spec)
            whole = Walk(compiled.start(), vocabulary, 3).run()
            for at in range(len(whole)):
                matcher, plain = compiled.start(), compiled.start()
                assert plain.advance(whole[:at]) == at
                wrong = next(i for i in range(vocabulary.vocab_size + 1) if not plain.legal_prefix([i]))
                for token_id in (wrong, -1, vocabulary.vocab_size, 2**31):
                    given = np.array([*whole[:at], token_id, *whole[at:]])
                    assert matcher.legal_prefix(given) == at, f"{spec.form}: {token_id} after {whole[:at]}"
                    assert matcher.advance(given) == at, f"{spec.form}: {token_id} after {whole[:at]}"
                    assert state_of(matcher, vocabulary) == state_of(plain, vocabulary)
                    matcher.rollback(at)
                if at > 12:
                    break

    def test_takes_tokens_one_by_one_or_together(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """A sequence that comes back after a preemption is taken in one call."""
        for spec in self.specs().values():
            compiled = create(vocabulary).compile(spec)
            walk = Walk(compiled.start(), vocabulary, 4)
            tokens = walk.run()
            again = compiled.start()
            assert again.advance(tokens) == len(tokens)
            assert state_of(again, vocabulary) == state_of(walk.matcher, vocabulary), walk.story(spec)

    def test_rollback_restores_every_state(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """By any number of tokens, end tokens among them, and on again another way."""
        for spec in self.specs().values():
            matcher = create(vocabulary).compile(spec).start()
            walk = Walk(matcher, vocabulary, 5)
            states = [state_of(matcher, vocabulary)]
            while len(states) < 40 and walk.step():
                states.append(state_of(matcher, vocabulary))
            if matcher.may_end:
                assert matcher.advance([vocabulary.end_ids[0]] * 2) == 2
                states += [state_of(matcher, vocabulary)] * 2
            random, at = np.random.default_rng(5), len(states) - 1
            tokens = [*walk.tokens, *[vocabulary.end_ids[0]] * 2]
            for _ in range(30):
                back = int(random.integers(0, at + 1))
                matcher.rollback(back)
                at -= back
                assert state_of(matcher, vocabulary) == states[at], f"{spec.form}: {back} tokens back to {at}"
                on = int(random.integers(0, len(states) - at))
                assert matcher.advance(tokens[at : at + on]) == on
                at += on
                assert state_of(matcher, vocabulary) == states[at], f"{spec.form}: on to {at}"

    def test_refuses_to_roll_back_what_was_not_taken(
        self, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """With a ValueError, and goes on."""
        for spec in self.specs().values():
            walk = Walk(create(vocabulary).compile(spec).start(), vocabulary, 6)
            walk.step()
            before = state_of(walk.matcher, vocabulary)
            for count in (len(walk.tokens) + 1, -1):
                with pytest.raises(ValueError):  # noqa: PT011 - any message
                    walk.matcher.rollback(count)
            assert state_of(walk.matcher, vocabulary) == before

    def test_looking_changes_nothing(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """`legal_prefix`, `forced`, `may_end`, `is_done` and `fill_mask`, in any order and number."""
        for spec in self.specs().values():
            compiled = create(vocabulary).compile(spec)
            path = Walk(compiled.start(), vocabulary, 7).run()
            matcher, plain = compiled.start(), compiled.start()
            for at, token_id in enumerate(path[:15]):
                for _ in range(2):
                    assert matcher.legal_prefix(path[at:]) == len(path) - at, f"{spec.form} after {path[:at]}"
                    state_of(matcher, vocabulary)
                assert matcher.advance([token_id]) == 1 == plain.advance([token_id])
            assert state_of(matcher, vocabulary) == state_of(plain, vocabulary)

    def test_serves_trees_depth_first(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """The mask of each node, reached by advancing and rolling back, is that of a matcher that took its path."""
        for spec in self.specs().values():
            compiled = create(vocabulary).compile(spec)
            matcher, random = compiled.start(), np.random.default_rng(8)

            def visit(path: list[int], depth: int) -> None:
                fresh = compiled.start()  # noqa: B023
                assert fresh.advance(path) == len(path)
                assert state_of(matcher, vocabulary) == state_of(fresh, vocabulary), f"after {path}"  # noqa: B023
                legal = bits(mask_of(matcher, vocabulary))  # noqa: B023
                for token_id in random.choice(legal, min(2, len(legal)), replace=False).tolist() if depth else ():  # noqa: B023
                    assert matcher.advance([token_id]) == 1  # noqa: B023
                    visit([*path, token_id], depth - 1)
                    matcher.rollback(1)  # noqa: B023

            visit([], 4)

    def test_forced_tokens_are_what_must_follow(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """They are legal, and all that may be drawn in their place begins with their text."""
        found = 0
        for spec in [*self.specs().values(), *self.forcing()]:
            compiled = create(vocabulary).compile(spec)
            for seed in range(4):
                walk = Walk(compiled.start(), vocabulary, seed)
                for _ in range(20):
                    forced = walk.matcher.forced()
                    assert isinstance(forced, tuple)
                    if forced:
                        found += 1
                        assert not set(forced) & set(vocabulary.end_ids), walk.story(spec)
                        assert walk.matcher.legal_prefix(forced) == len(forced), walk.story(spec)
                        assert not walk.matcher.may_end, walk.story(spec)
                        self._check_forced(compiled, walk, forced)
                    if not walk.step():
                        break
        if self.plugin.capabilities.forced:
            assert found, "it declares that it finds forced tokens, and finds none"
        else:
            assert not found, "it finds forced tokens, and does not declare it"

    def _check_forced(self, compiled: CompiledGrammar, walk: Walk, forced: Sequence[int]) -> None:
        text = walk.vocabulary.decode(list(forced))
        for seed in range(3):
            other = Walk(compiled.start(), walk.vocabulary, seed + 100)
            other.matcher.advance(walk.tokens)
            written = b""
            while len(written) < len(text):
                if self.plugin.capabilities.canonical:
                    assert other.legal() == [forced[len(other.tokens)]], "canonical, and another token is legal"
                assert other.step(), "it ends before what is forced has come"
                assert len(other.tokens) < 1000, f"1000 tokens are legal and {text!r} has not come"
                written = walk.vocabulary.decode(other.tokens)
                assert written.startswith(text) or text.startswith(written), f"{text!r} is forced, {written!r} follows"

    def forcing(self) -> list[GrammarSpec]:
        """Specs with one way on."""
        known = [
            GrammarSpec(form="choice", source='["nothing else"]'),
            GrammarSpec(form="regex", source="nothing else [0-9]"),
        ]
        return [spec for spec in known if spec.form in self.plugin.capabilities.forms]

    def test_ends_where_it_may(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """End tokens are legal where the output is complete, all of them, and nothing but them behind one."""
        ends = list(vocabulary.end_ids)
        completed = 0
        for spec in self.specs().values():
            compiled = create(vocabulary).compile(spec)
            for seed in range(6):
                walk = Walk(compiled.start(), vocabulary, seed)
                while True:
                    legal = walk.legal()
                    assert set(legal) & set(ends) == (set(ends) if walk.matcher.may_end else set()), walk.story(spec)
                    assert walk.matcher.is_done == (legal == ends), walk.story(spec)
                    if walk.matcher.may_end:
                        assert walk.matcher.advance([ends[1], ends[0]]) == 2, walk.story(spec)
                        assert walk.matcher.may_end
                        assert walk.matcher.is_done
                        assert walk.legal() == ends, f"behind an end: {walk.story(spec)}"
                        assert walk.matcher.forced() == ()
                        walk.matcher.rollback(2)
                        completed += 1
                    if not walk.step() or len(walk.tokens) == 60:
                        break
        assert completed

    def test_serves_logits_narrower_than_the_tokenizer(self, create: Callable[..., Grammar]) -> None:
        """Models may lack tokens that their tokenizer has."""
        vocabulary = cases.bpe_vocabulary()
        narrow = 300
        for spec in self.specs().values():
            if spec.form == STRUCTURAL_TAG:
                continue
            wide = create(vocabulary).compile(spec).start()
            matcher = create(vocabulary, vocab_size=narrow, eos_token_ids=(narrow - 1,)).compile(spec).start()
            row = np.full(-(-narrow // 32), -1, np.int32)
            matcher.fill_mask(row)
            expected = [i for i in bits(mask_of(wide, vocabulary)) if i < narrow - 1]
            assert [i for i in bits(row) if i != narrow - 1] == expected

    def test_matchers_of_one_grammar_do_not_disturb_each_other(
        self, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """Two that take turns end up where each ends up alone."""
        for spec in self.specs().values():
            compiled = create(vocabulary).compile(spec)
            alone = [Walk(compiled.start(), vocabulary, seed) for seed in (11, 12)]
            for walk in alone:
                for _ in range(30):
                    walk.step()
            together = [Walk(compiled.start(), vocabulary, seed) for seed in (11, 12)]
            for _ in range(30):
                for walk in together:
                    walk.step()
            for one, other in zip(alone, together, strict=True):
                assert one.tokens == other.tokens
                assert state_of(one.matcher, vocabulary) == state_of(other.matcher, vocabulary)

    def test_serves_several_threads(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """Compilations and matchers side by side give what they give one after the other."""
        grammar, specs = create(vocabulary), list(self.specs().values()) * 3

        def run(index: int) -> tuple[list[int], Any]:
            walk = Walk(grammar.compile(specs[index]).start(), vocabulary, index)
            walk.run(25)
            return walk.tokens, state_of(walk.matcher, vocabulary)

        one_by_one = [run(index) for index in range(len(specs))]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(run, range(len(specs)))) == one_by_one

    def test_leaves_alone_what_is_not_its_own(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """Lists of tokens, and the random generators of the process."""
        grammar = create(vocabulary)
        for spec in self.specs().values():
            tokens = Walk(grammar.compile(spec).start(), vocabulary, 13).run(20)
            with leaves_alone(tokens, spec):
                matcher = grammar.compile(spec).start()
                matcher.legal_prefix(tokens)
                matcher.advance(tokens)
                state_of(matcher, vocabulary)
                matcher.rollback(len(tokens))

    def test_options_and_setup_pickle(self) -> None:
        """They travel to the rank that samples."""
        options = self.plugin.Options.model_validate(dict(self.options))
        assert pickle.loads(pickle.dumps(options)) == options
