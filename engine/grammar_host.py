"""The grammar plugin of an engine: its compiler, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.engine_client import GrammarFacts
from dovetail.contracts.grammar import Grammar, GrammarSetup
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler


@dataclass(frozen=True)
class GrammarHost:
    """What compiles the grammars of an engine's requests."""

    facts: GrammarFacts
    compiler: GrammarCompiler | None
    """None: requests with a grammar are refused."""

    def close(self) -> None:
        """Ends the plugin."""
        if self.compiler is not None:
            self.compiler.close()


def create_grammar_host(config: ResolvedConfig, plugins: LoadedPlugins, tokenizer: Tokenizer | None) -> GrammarHost:
    """The plugin of the config, where the tokenizer serves it."""
    if config.grammar is None:
        return GrammarHost(GrammarFacts(refusal=_why_none(config)), None)
    component = config.grammar.component
    plugin, _ = plugins.get(component)
    assert issubclass(plugin, Grammar)
    tokenizer_json = None if tokenizer is None else tokenizer.tokenizer_json
    if tokenizer_json is None and not plugin.capabilities.without_tokenizer_json:
        refusal = (
            f"grammar plugin {component.name!r} reads tokenizers in the form of tokenizer.json, and this one has none:"
            " set model.tokenizer to a directory with tokenizer.json"
        )
        return GrammarHost(GrammarFacts(name=component.name, refusal=refusal), None)
    setup = GrammarSetup(
        vocab_size=config.model.vocab_size,
        eos_token_ids=config.model.eos_token_ids,
        tokenizer_json=tokenizer_json,
        limits=config.grammar.limits,
    )
    forms = tuple(sorted(plugin.capabilities.forms))
    compiler = GrammarCompiler(component, setup, config.grammar.wait_s, config.grammar.read_ahead)
    compiler.read_ahead()
    return GrammarHost(GrammarFacts(name=component.name, forms=forms), compiler)


def _why_none(config: ResolvedConfig) -> str:
    for decision in config.decisions:
        if decision.key == "grammar.name" and decision.got is None:
            against = [f"{name}: {' '.join(reasons)}" for name, reasons in decision.candidates if reasons]
            return "; ".join([decision.reason, *against])
    return "the config sets grammar to null: name a plugin there, or leave it out"
