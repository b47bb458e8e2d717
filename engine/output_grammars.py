"""What a request asks of the form of its output, checked where the request is made."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.engine.tokenization.tokenizer import Tokenizer


class OutputGrammars:
    """Compares what requests ask for with the grammar plugin of the engine."""

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer | None):
        self._facts = facts
        self._tokenizer = tokenizer

    def grammar_of(self, asked: StructuredOutputs | None, prompt_token_ids: Sequence[int]) -> OutputGrammar | None:
        """What the workers are told; None where the request asks for no form. Raises `RequestError` for what the engine
        cannot serve."""
        if asked is None:
            return None
        plugin = self._facts.grammar
        if plugin.refusal:
            raise RequestError(f"structured_outputs cannot be served: {plugin.refusal}")
        missing = asked.spec.forms - set(plugin.forms)
        if missing:
            raise RequestError(
                f"grammar plugin {plugin.name!r} compiles no grammars of form {', '.join(sorted(missing))}; it compiles"
                f" {', '.join(sorted(plugin.forms))}: ask for one of these, or set another grammar.name"
            )
        marker = self._marker(asked.starts_after)
        has_marker = marker and tuple(prompt_token_ids[-len(marker) :]) == marker
        return OutputGrammar(spec=asked.spec, starts_after=() if has_marker else marker)

    def _marker(self, asked: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(asked, str):
            # There is a tokenizer, since there is a grammar plugin; those without one take token ids.
            if self._tokenizer is None:
                raise RequestError("starts_after as text needs a tokenizer, and this engine has none: give token ids")
            return tuple(self._tokenizer.encode(asked, add_special_tokens=False)) if asked else ()
        for token in asked:
            if not 0 <= token < self._facts.vocab_size or token in self._facts.eos_token_ids:
                raise RequestError(f"starts_after holds {token}, which is no token id, or an end of sequence")
        return tuple(asked)
