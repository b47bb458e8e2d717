"""Grammar: constrained decoding. It says which tokens may come next, so that the output has a given form.

The host creates one instance in the engine's process, and another on the rank that samples where that is another
process. It calls them in this order:

    grammar.compile(spec)         once per different `GrammarSpec`, on a thread of its own; requests with the same spec
                                  share what comes back
    compiled.start()              once per sequence: each of the `n` completions of a request has its own `Matcher`
    matcher.fill_mask(row)        before each token is drawn, while the forward pass runs
    matcher.advance(token_ids)    once the step's tokens are known

so one step of one sequence reads:

    fill_mask(row)                -> row says that of 49,152 tokens those of digits are legal
    advance([34])                 -> 1     the token was drawn and taken
    may_end, is_done              -> True, False     the output is complete as it is, and may go on

Drafts are judged by the same calls. The host walks a tree of them depth first: it advances by a node, fills the node's
row, walks the children, and rolls the node back. A matcher need not be copied for that, so the contract has no copy.

**Legal** is one word with one meaning: a token is legal in a state if its bit is set in the mask of that state, if
`advance` takes it there, and if `legal_prefix` counts it. Ends of sequence are tokens like others: each of
`GrammarSetup.eos_token_ids` is legal where the grammar may end, and nowhere else. Behind an end token nothing but end
tokens is legal, so that a row behind a draft that ends the sequence can be sampled like any other.

Text that has the form is what counts: which of the tokenizations of a legal text are legal is the plugin's to say
(`GrammarCapabilities.canonical`). Tokens that stand for no text (special tokens, and ids that the tokenizer does not
have) are legal only where the grammar names them.

What a mask says follows from the spec, the setup and the tokens taken: no clock, no random numbers, no other sequence.

Work on a grammar may explode: 10^5 alternatives, schemas that refer to themselves, nested repetitions. `compile` ends
in a `RequestError` where `GrammarLimits` do not suffice, and so does a call of a matcher; none hangs. Nothing is
ignored: a keyword of a schema, or an operator of a regular expression, that the plugin does not enforce is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.contracts.needs import compared, informs
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """What the work on one grammar may take. What takes more is refused."""

    source_bytes: int = 2**20
    """Of a spec: sources, and texts of tags, in UTF-8."""
    compile_seconds: float = 10.0
    compile_bytes: int = 2**30
    """Memory that `compile` takes, and what it returns."""


@dataclass(frozen=True, kw_only=True)
class GrammarSetup:
    """Facts about the model, and the limits that the config gives."""

    vocab_size: int
    """Width of the logits. May be more than the tokenizer has tokens; those that it has not are never legal."""
    eos_token_ids: tuple[int, ...]
    """At least one, each below `vocab_size`: the host refuses grammars for models that have none, since no output could
    end. They are end tokens wherever they are, also if the tokenizer has text for them."""
    tokenizer_json: str | None
    """The tokenizer in the `tokenizers` library's JSON form; None only where the plugin declares that it does
    `without_tokenizer_json`. Tokenizers of other libraries (`tokenizer_mode: mistral`) have no such form."""
    limits: GrammarLimits = field(default_factory=GrammarLimits)


@dataclass(frozen=True, kw_only=True)
class GrammarCapabilities:
    """What a plugin can do."""

    forms: frozenset[str] = frozenset()
    """The forms that it compiles; a spec with others is refused."""
    json_keywords: frozenset[str] = frozenset()
    """Keywords of JSON Schema that it enforces. Others are refused, whether JSON Schema knows them or not, but for
    annotations (`title`, `description`, `default`, `examples`, ...). It may refuse what it cannot do with a keyword (a
    `$ref` to another document, say)."""
    json_formats: frozenset[str] = frozenset()
    """Values of the keyword `format` that it enforces; others are refused."""
    canonical: bool = False
    """Where a text is forced, only the tokenization that the tokenizer itself gives it is legal, which is what models
    were trained on. Without it, any token whose text fits is legal."""
    forced: bool = False
    """`Matcher.forced` finds forced tokens; others always return ()."""
    without_tokenizer_json: bool = False
    """Knows the vocabulary without `GrammarSetup.tokenizer_json`."""


def _missing_json(without: bool, has_json: bool) -> bool | None:
    return None if has_json or without else True


@dataclass(frozen=True, kw_only=True)
class GrammarNeed:
    """What the config asks of the grammars of an engine; the argument of `check`. The forms of requests are compared
    with the capabilities when they come."""

    vocab_size: int = field(metadata=informs("masks have the width of the logits, whatever it is"))
    has_tokenizer_json: bool = field(
        metadata=compared(
            "without_tokenizer_json",
            _missing_json,
            "{name} reads tokenizers in the form of tokenizer.json, which this one has not: set model.tokenizer to a "
            "directory with tokenizer.json.",
        )
    )
    """Whether `GrammarSetup.tokenizer_json` is given."""


class Matcher(ABC):
    """Follows the output of one sequence. Used by one thread at a time; two matchers of one grammar may be used by two.

    Calls that cost more than some microseconds should release the GIL. Where limits do not suffice to say what is
    legal, a call raises `RequestError`; the host then ends the sequence and drops the matcher.
    """

    @abstractmethod
    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Writes which tokens are legal now.

        Args:
            row: int32 [ceil(vocab_size / 32)], contiguous, with any content; the host's, not to be kept. Bit i % 32 of
                entry i // 32, counted from the lowest, becomes 1 if token i is legal; bits of ids from vocab_size on
                become 0.

        Never leaves a row without a bit: raises `RequestError` where no token of the vocabulary can follow.
        """

    @abstractmethod
    def advance(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Takes the first tokens, up to the first one that is not legal, and returns how many. What is not taken leaves
        no trace. `token_ids`: any integers, also such as are no ids; an array is int64 or int32 [n]."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens: everything is as it was before them. Costs no more than `advance` by as many.
        Raises ValueError for fewer than 0, and for more than were taken."""

    @abstractmethod
    def legal_prefix(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """How many `advance` would take; nothing changes. For hosts that cut drafts which are chains."""

    @abstractmethod
    def forced(self) -> tuple[int, ...]:
        """Tokens that come next whatever is drawn: legal one after the other, and every output that the grammar still
        allows begins with their text. Empty where there is a choice; end tokens are never among them. With them a
        drafter guesses with probability 1, as far as tokenizations go (`GrammarCapabilities.canonical`)."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the output is complete: end tokens are legal."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether it is complete and nothing but end tokens is legal, an end token having been taken or not. The host
        draws an end token then, whatever `min_tokens` of the request says."""


class CompiledGrammar(ABC):
    """A grammar over a vocabulary, shared by all sequences that have it. Does not change."""

    @abstractmethod
    def start(self) -> Matcher:
        """A matcher in front of the first token. May be called by several threads at a time; costs tens of
        microseconds, not a compilation."""


class Grammar(Plugin):
    """Compiles grammars for one model.

    `__init__` may take seconds (it reads the vocabulary) and runs on the thread that compiles, or on one of its own
    while the engine starts.
    """

    capabilities: ClassVar[GrammarCapabilities] = GrammarCapabilities()

    def __init__(self, options: PluginOptions, setup: GrammarSetup):
        self.options = options
        self.setup = setup

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """What `spec` describes, over the setup's vocabulary.

        May be called by several threads at a time, none of them the one that runs steps, and releases the GIL while it
        works. Deterministic but for `compile_seconds`.

        Raises `RequestError`, and nothing else, for a form that is not declared, a source that is wrong, what is not
        enforced, a grammar that allows no first token, and where limits do not suffice. The message is for the user; of
        a JSON Schema it says where, as a JSON pointer ("#/properties/age/not"), of other notations the line or the
        character if it can. One that does not come back at all costs its request alone: the host refuses it after
        `grammar.wait_seconds` of the config.
        """

    def close(self) -> None:
        """The host needs it no longer, nor its matchers: ends processes and threads. Without override: nothing."""
        return None
