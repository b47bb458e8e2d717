"""The rule about grammars: what compiles those of requests, where the model has what they need."""

from __future__ import annotations

from dataclasses import replace

from dovetail.config.resolved import ResolvedGrammar, ResolvedModel
from dovetail.config.schema import AUTO, GrammarSection
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.grammar import GrammarLimits, GrammarNeed
from dovetail.engine.resolving.choose import Question, go_without
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import GRAMMAR

_WAIT_S = 60.0
NO_END = "the model's config names no end-of-sequence token, so that no output with a grammar could end"


def choose_grammar(state: Resolution, model: ResolvedModel) -> ResolvedGrammar | None:
    """None where the config wants none, or `auto` finds none that can be used."""
    section = state.config.grammar
    if section is None:
        return None
    if not model.eos_token_ids:
        if section.name != AUTO:
            origin = state.layered.origin("grammar.name")
            raise ConfigError(f"grammar.name {section.name!r} ({origin}): {NO_END}; set grammar to null")
        go_without(state, GRAMMAR.path, section, NO_END)
        return None
    # Whether the tokenizer that is loaded later has this form in fact is for the engine to see.
    need = GrammarNeed(vocab_size=model.vocab_size, has_tokenizer_json=model.tokenizer_mode == AUTO)
    otherwise = "no installed plugin can be used: requests with a grammar are refused"
    chosen = Question(state, GRAMMAR, need).choose_or_none(otherwise)
    if chosen is None:
        return None
    return ResolvedGrammar(
        chosen.component, _limits(section), section.wait_seconds or _WAIT_S, bool(section.read_ahead)
    )


def _limits(section: GrammarSection) -> GrammarLimits:
    limits = GrammarLimits()
    if section.source_bytes is not None:
        limits = replace(limits, source_bytes=section.source_bytes)
    if section.compile_seconds is not None:
        limits = replace(limits, compile_seconds=section.compile_seconds)
    if section.compile_gib is not None:
        limits = replace(limits, compile_bytes=int(section.compile_gib * 2**30))
    return limits
