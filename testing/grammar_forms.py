"""What each form of a grammar means: the part of the suite that asks for outputs.

Oracles are the library jsonschema, Python's `re`, and lists of texts. See `grammar_suite`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jsonschema
import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarLimits, GrammarSetup
from dovetail.contracts.grammar_spec import FORMS, STRUCTURAL_TAG, GrammarSpec
from dovetail.testing import grammar_cases as cases
from dovetail.testing.grammar_cases import VOCABULARIES, Vocabulary
from dovetail.testing.grammar_walks import Walk, accepts, bits, compact, mask_of, outputs, schema_spec, state_of
from dovetail.testing.suite import PluginSuite

BOMB_LIMITS = GrammarLimits(source_bytes=2**24, compile_seconds=3.0, compile_bytes=2**29)


class GrammarForms(PluginSuite):
    """Made of a plugin: what `GrammarSuite` builds on."""

    kind: ClassVar[str] = "grammar"
    plugin: ClassVar[type[Grammar]]
    options: ClassVar[Mapping[str, Any]] = {}
    samples: ClassVar[Mapping[str, GrammarSpec]] = {}
    """One spec for each form of the plugin's own, which `FORMS` does not define."""
    hang_s: ClassVar[float] = 120.0
    """A compilation that has not ended by then hangs: the limits allow a fraction of it."""

    @pytest.fixture(params=sorted(VOCABULARIES))
    def vocabulary(self, request: pytest.FixtureRequest) -> Vocabulary:
        """Each in turn."""
        return VOCABULARIES[request.param]()

    @pytest.fixture
    def create(self) -> Iterator[Callable[..., Grammar]]:
        """Makes grammars over a vocabulary, and closes them."""
        made: list[Grammar] = []

        def make(vocabulary: Vocabulary, limits: GrammarLimits | None = None, **changes: Any) -> Grammar:
            facts: dict[str, Any] = {
                "vocab_size": vocabulary.vocab_size,
                "eos_token_ids": vocabulary.end_ids,
                "tokenizer_json": vocabulary.tokenizer_json,
                "limits": limits or GrammarLimits(),
            }
            options = self.plugin.Options.model_validate(dict(self.options))
            made.append(self.plugin(options, GrammarSetup(**facts | changes)))
            return made[-1]

        yield make
        for grammar in made:
            grammar.close()

    def specs(self) -> dict[str, GrammarSpec]:
        """A spec for each form that the plugin declares."""
        known = {**cases.SAMPLES, **self.samples}
        return {form: known[form] for form in sorted(self.plugin.capabilities.forms)}

    def needs(self, *forms: str) -> None:
        """Skips the test where the plugin does not compile these forms."""
        for form in forms:
            self.require(forms=form)

    @pytest.mark.parametrize("form", sorted(FORMS))
    def test_compiles_the_forms_that_it_declares_and_no_others(
        self, form: str, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """A form that is not declared is refused, inside of tags too."""
        grammar, spec = create(vocabulary), cases.SAMPLES[form]
        assert self.plugin.capabilities.forms, "it declares no form"
        if spec.forms <= self.plugin.capabilities.forms:
            assert isinstance(grammar.compile(spec), CompiledGrammar)
        else:
            with pytest.raises(RequestError):
                grammar.compile(spec)

    @pytest.mark.parametrize("keyword", sorted(cases.KEYWORDS))
    def test_enforces_or_refuses_each_keyword(self, keyword: str, create: Callable[..., Grammar]) -> None:
        """Of JSON Schema: a keyword that is not declared is refused with its place."""
        self.needs("json_schema")
        vocabulary, case = cases.byte_vocabulary(), cases.KEYWORDS[keyword]
        grammar = create(vocabulary)
        wrapped = {"type": "object", "properties": {"p/q": case.schema}, "$defs": case.schema.get("$defs", {})}
        spec, inner = schema_spec(case.schema), schema_spec(wrapped)
        if keyword not in self.plugin.capabilities.json_keywords:
            for one, place in ((spec, "#/"), (inner, "#/properties/p~1q/")):
                with pytest.raises(RequestError, match=re.escape(place + keyword)):
                    grammar.compile(one)
            return
        compiled = grammar.compile(spec)
        assert accepts(compiled, vocabulary, compact(case.valid[0])), f"{case.valid[0]!r} is valid"
        for value in case.invalid:
            assert not accepts(compiled, vocabulary, compact(value)), f"{value!r} is not valid"

    @pytest.mark.parametrize("keyword", ["exclusiveMinimum", "exclusiveMaximum"])
    def test_numbers_keep_to_their_bounds_as_floats(self, keyword: str, create: Callable[..., Grammar]) -> None:
        """Clients read 0.25000000000000001 as 0.25, which an exclusive bound of 0.25 forbids. Bounds of numbers may be
        refused."""
        self.needs("json_schema")
        vocabulary = cases.byte_vocabulary()
        texts = {
            "exclusiveMinimum": (b"0.25000000000000001", b"0.5"),
            "exclusiveMaximum": (b"0.24999999999999999999", b"0.1"),
        }
        try:
            compiled = create(vocabulary).compile(schema_spec({"type": "number", keyword: 0.25}))
        except RequestError:
            return
        rounded, within = texts[keyword]
        assert accepts(compiled, vocabulary, within)
        assert not accepts(compiled, vocabulary, rounded), f"{rounded!r} is read as 0.25"

    @pytest.mark.parametrize("name", sorted(cases.FORMATS))
    def test_enforces_or_refuses_each_format(self, name: str, create: Callable[..., Grammar]) -> None:
        """Values of the keyword `format`."""
        self.needs("json_schema")
        vocabulary, (valid, invalid) = cases.byte_vocabulary(), cases.FORMATS[name]
        grammar, spec = create(vocabulary), schema_spec({"type": "string", "format": name})
        if name not in self.plugin.capabilities.json_formats:
            with pytest.raises(RequestError, match="#/format"):
                grammar.compile(spec)
            return
        compiled = grammar.compile(spec)
        assert accepts(compiled, vocabulary, compact(valid[0])), f"{valid[0]!r} is valid"
        for value in invalid:
            assert not accepts(compiled, vocabulary, compact(value)), f"{value!r} is not valid"

    @pytest.mark.parametrize(
        ("schema", "place"),
        [
            ({"type": "string", "maxLenght": 3}, "#/maxLenght"),
            ({"type": "string", "format": "postcode"}, "#/format"),
            ({"anyOf": [{"type": "null"}, {"made up": 1}]}, "#/anyOf/1/made up"),
            ({"items": {"$ref": "https://example.com/schema"}}, "#/items/$ref"),
        ],
    )
    def test_refuses_what_nobody_enforces_with_its_place(
        self, schema: dict[str, Any], place: str, create: Callable[..., Grammar]
    ) -> None:
        """Keywords and formats that do not exist, and documents that nobody fetches."""
        self.needs("json_schema")
        with pytest.raises(RequestError, match=re.escape(place)):
            create(cases.byte_vocabulary()).compile(schema_spec(schema))

    def test_takes_annotations(self, create: Callable[..., Grammar]) -> None:
        """Titles and the like forbid nothing, so nothing is passed over with them."""
        self.needs("json_schema")
        vocabulary = cases.byte_vocabulary()
        compiled = create(vocabulary).compile(schema_spec(cases.ANNOTATED))
        assert accepts(compiled, vocabulary, b'{"x":1,"y":2}')

    @pytest.mark.parametrize("name", sorted(cases.SCHEMAS))
    def test_outputs_are_valid_by_their_schema(
        self, name: str, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """Says the library jsonschema."""
        self.needs("json_schema")
        schema, needed = cases.SCHEMAS[name], cases.SCHEMA_KEYWORDS[name]
        for keyword in sorted(needed):
            self.require(json_keywords=keyword)
        for text in outputs(create(vocabulary).compile(schema_spec(schema, max_whitespace=1)), vocabulary):
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)

    def test_outputs_of_json_object_are_objects(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """Says Python."""
        self.needs("json_object")
        for text in outputs(create(vocabulary).compile(cases.SAMPLES["json_object"]), vocabulary):
            assert isinstance(json.loads(text), dict)

    @pytest.mark.parametrize("most", [None, 0, 2])
    def test_bounds_whitespace(self, most: int | None, create: Callable[..., Grammar]) -> None:
        """Of JSON, at each place."""
        self.needs("json_schema")
        vocabulary = cases.byte_vocabulary()
        spec = schema_spec(cases.KEYWORDS["properties"].schema | {"required": ["a"]}, max_whitespace=most)
        compiled = create(vocabulary).compile(spec)
        for count in range(5):
            space = (" \n" * count)[:count]
            for text in (f'{{{space}"a":1}}', f'{{"a":{space}1}}', f'{{"a":1{space}}}'):
                is_legal = most is None or count <= most
                assert accepts(compiled, vocabulary, text.encode()) == is_legal, f"{text!r} of at most {most}"

    @pytest.mark.parametrize("pattern", sorted(cases.REGEXES))
    def test_outputs_match_their_regular_expression(
        self, pattern: str, create: Callable[..., Grammar], vocabulary: Vocabulary
    ) -> None:
        """Says `re.fullmatch`; and what matches is possible, spelled as the tokenizer spells it."""
        self.needs("regex")
        compiled = create(vocabulary).compile(GrammarSpec(form="regex", source=pattern))
        for text in outputs(compiled, vocabulary):
            assert re.fullmatch(pattern, text.decode(), re.ASCII), f"{text!r} does not match"
        matching, others = cases.REGEXES[pattern]
        for whole in matching:
            assert re.fullmatch(pattern, whole, re.ASCII)
            assert accepts(compiled, vocabulary, whole.encode()), f"{whole!r} matches"
        for whole in others:
            assert not accepts(compiled, vocabulary, whole.encode()), f"{whole!r} does not match"

    def test_outputs_are_among_the_choices(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """And each choice is possible, whatever characters it has."""
        self.needs("choice")
        compiled = create(vocabulary).compile(cases.SAMPLES["choice"])
        for text in outputs(compiled, vocabulary):
            assert text.decode() in cases.CHOICES
        compiled = create(cases.byte_vocabulary()).compile(cases.SAMPLES["choice"])
        for choice in cases.CHOICES:
            assert accepts(compiled, cases.byte_vocabulary(), choice.encode())
            assert not accepts(compiled, cases.byte_vocabulary(), choice.encode()[:-1])

    @pytest.mark.parametrize("form", ["lark", "gbnf"])
    def test_follows_rules_that_refer_to_themselves(self, form: str, create: Callable[..., Grammar]) -> None:
        """Parentheses to any depth, with a word inside."""
        self.needs(form)
        vocabulary = cases.byte_vocabulary()
        compiled = create(vocabulary).compile(cases.SAMPLES[form])
        for text in (b"()", b"(ab)", b"(" * 40 + b"abc" + b")" * 40):
            assert accepts(compiled, vocabulary, text)
        for text in (b"", b"ab", b"(()", b"())", b"(A)", b"()()"):
            assert not accepts(compiled, vocabulary, text)
        for text in outputs(compiled, vocabulary):
            assert re.fullmatch(rb"(\(+)([a-z]*)(\)+)", text), text
            assert text.count(b"(") == text.count(b")")

    def test_text_is_free_outside_of_tags_alone(self, create: Callable[..., Grammar], vocabulary: Vocabulary) -> None:
        """Behind a trigger nothing but one of its tags is possible."""
        self.needs(STRUCTURAL_TAG, "regex", "choice")
        compiled = create(vocabulary).compile(cases.TAGS)
        legal, wrong = cases.TAGGED
        for text in legal:
            assert accepts(compiled, vocabulary, text.encode()), f"{text!r} is right"
        for text in wrong:
            assert not accepts(compiled, vocabulary, text.encode()), f"{text!r} is wrong"
        for output in outputs(compiled, vocabulary, at_least=0):
            rest = re.sub(rb"<f=int>[0-9]{1,3}</f>|<f=word>(on|off)</f>", b"", output)
            assert b"<f=" not in rest, output

    @pytest.mark.parametrize("at_least_one", [False, True])
    @pytest.mark.parametrize("stop_after_first", [False, True])
    def test_counts_tags(self, at_least_one: bool, stop_after_first: bool, create: Callable[..., Grammar]) -> None:
        """None, one or more, as the spec says."""
        self.needs(STRUCTURAL_TAG, "regex", "choice")
        vocabulary = cases.byte_vocabulary()
        spec = replace(cases.TAGS, at_least_one=at_least_one, stop_after_first=stop_after_first)
        compiled = create(vocabulary).compile(spec)
        assert accepts(compiled, vocabulary, b"none") == (not at_least_one)
        assert accepts(compiled, vocabulary, b"x <f=int>1</f>")
        assert accepts(compiled, vocabulary, b"<f=int>1</f> and <f=int>2</f>") == (not stop_after_first)
        matcher = compiled.start()
        matcher.advance(list(b"x <f=int>1</f>"))
        assert matcher.is_done == stop_after_first

    def test_triggers_may_be_special_tokens(self, create: Callable[..., Grammar]) -> None:
        """By their names: the token is meant then, and it alone."""
        self.needs(STRUCTURAL_TAG, "regex")
        vocabulary = cases.byte_vocabulary()
        try:
            compiled = create(vocabulary).compile(cases.CALLS)
        except RequestError as error:
            pytest.skip(f"{self.plugin.__name__} refuses special tokens in tags: {error}")
        call = vocabulary.special[cases.CALL]
        matcher = compiled.start()
        assert matcher.advance([*b"hi", call, *b"12"]) == 5
        assert bits(mask_of(matcher, vocabulary)) == [call]
        assert matcher.advance([call, *b"bye"]) == 4
        assert matcher.may_end

    @pytest.mark.parametrize("form", sorted(cases.WRONG))
    def test_refuses_sources_that_are_wrong(self, form: str, create: Callable[..., Grammar]) -> None:
        """With a `RequestError`, whatever the library raises; and compiles the next one."""
        self.needs(form)
        grammar = create(cases.byte_vocabulary())
        for source in cases.WRONG[form]:
            with pytest.raises(RequestError):
                grammar.compile(GrammarSpec(form=form, source=source))
        grammar.compile(cases.SAMPLES[form])

    def test_refuses_sources_beyond_the_limit(self, create: Callable[..., Grammar]) -> None:
        """Of a spec, its tags included."""
        grammar = create(cases.byte_vocabulary(), GrammarLimits(source_bytes=20))
        for spec in self.specs().values():
            if len(spec.source) + sum(len(tag.content.source + tag.begin + tag.end) for tag in spec.tags) > 20:
                with pytest.raises(RequestError):
                    grammar.compile(spec)

    @pytest.mark.parametrize("name", sorted(cases.bombs()))
    def test_explosions_end_in_a_refusal(self, name: str, create: Callable[..., Grammar]) -> None:
        """Either the spec compiles, and walks end or are refused, or it is refused; nothing hangs."""
        spec, vocabulary = cases.bombs()[name], cases.byte_vocabulary()
        self.needs(spec.form)
        grammar = create(vocabulary, BOMB_LIMITS)
        ended = threading.Event()
        faults: list[BaseException] = []

        def run() -> None:
            try:
                Walk(grammar.compile(spec).start(), vocabulary, 21).run(20)
            except RequestError:
                pass
            except BaseException as error:
                faults.append(error)
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        assert ended.wait(self.hang_s), "it hangs"
        assert not faults, f"raises {faults[0]!r}, which is no RequestError"

    def test_compiles_after_a_refusal_as_before(self, create: Callable[..., Grammar]) -> None:
        """A spec that was stopped leaves nothing behind."""
        vocabulary = cases.byte_vocabulary()
        grammar = create(vocabulary, BOMB_LIMITS)
        specs = self.specs()
        before = {form: state_of(grammar.compile(spec).start(), vocabulary) for form, spec in specs.items()}
        for name in ("a large divisor", "nested repetitions"):
            if (bomb := cases.bombs()[name]).form in specs:
                try:
                    grammar.compile(bomb)
                except RequestError:
                    continue
        after = {form: state_of(grammar.compile(spec).start(), vocabulary) for form, spec in specs.items()}
        assert before == after
