"""Suffix decoding: looks up the last tokens in the request and in earlier answers, and proposes what most often
followed there; the longer the match, the longer the draft.

Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). Where the paper keeps suffix trees, a request's own tokens are
searched anew each time, since comparing a few thousand integers takes numpy a few microseconds, and earlier answers lie
in a sorted table (see `store`). What comes out is the same: all earlier occurrences of each suffix of the last
`max_match` tokens (among the latest 256 places that end like it), and how often each token followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftRequest,
    DraftSetup,
    LearnsFromRequests,
    ReadsTokenizer,
    SpeculationNeed,
    TreesByOption,
)
from dovetail.spec_decode.matching import MAX_MATCHES, Guess, best_guess, match_lengths, padded
from dovetail.spec_decode.suffix.corpus import PAD, Corpus, open_corpus
from dovetail.spec_decode.suffix.documents import corpus_files, needs_tokenizer
from dovetail.spec_decode.suffix.store import AnswerStore


class SuffixOptions(PluginOptions):
    """Options of `suffix`: what counts as a match, and how long a draft it gives."""

    min_match: int = Field(default=2, ge=1)
    """Tokens at the end that must occur before, at least. Earlier answers are searched for two at least."""
    max_match: int = Field(default=24, ge=1)
    """Longer matches count as this long."""
    max_spec_factor: float = Field(default=1.0, gt=0)
    """A match of n tokens gives at most this times n guesses, and never more than num_tokens."""
    min_token_prob: float = Field(default=0.1, ge=0, le=1)
    """Draft tokens with a lower probability, estimated from what followed before, are left out."""
    max_cached_tokens: int = Field(default=262_144, ge=0)
    """Tokens of finished requests' answers that are kept; the least recently used are dropped. 0: only the request
    itself is searched. Texts do not depend on it, but the speed of a text may then reveal the answers of others."""
    corpus: Path | None = None
    """A file or folder of documents to guess from as well: text (.txt, .md), lines of JSON (.jsonl, each a text, a list
    of token ids, or an object with `text` or `token_ids`), numpy arrays of token ids (.npy). It is indexed once, in
    the user's cache folder. With `max_cached_tokens: 0` nothing of other requests is mixed in."""
    max_corpus_tokens: int = Field(default=4_194_304, ge=1)
    """A larger corpus is refused: indexing takes about 60 bytes of memory per token, the index 16 on disk."""
    tree: bool = False
    """Whether several continuations of one match are proposed at once, as a tree."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match ({self.min_match}) must not exceed max_match ({self.max_match})")
        if self.corpus is not None and self.max_match > PAD:
            raise ValueError(f"max_match ({self.max_match}) must not exceed {PAD} with a corpus")
        return self


class SuffixDrafter(TreesByOption, LearnsFromRequests, ReadsTokenizer):
    """Needs no weights. Guesses are the most frequent continuations, not draws: no draft distributions are given."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = SuffixOptions
    capabilities = DraftCapabilities(tensor_parallel=None, trees=True, confidence=True)
    options: SuffixOptions

    @classmethod
    def proposes_trees(cls, options: PluginOptions) -> bool:
        """Whether the option `tree` is set."""
        assert isinstance(options, SuffixOptions)
        return options.tree

    @classmethod
    def reads_tokenizer(cls, options: PluginOptions) -> bool:
        """Where its corpus holds text."""
        assert isinstance(options, SuffixOptions)
        return options.corpus is not None and needs_tokenizer(corpus_files(options.corpus))

    @classmethod
    def check(cls, need: SpeculationNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses a corpus that cannot be read at all; its documents are read when it is indexed."""
        if options.corpus is None:
            return []
        try:
            reads_text = cls.reads_tokenizer(options)
        except (ConfigError, OSError) as error:
            return [str(error)]
        if reads_text and not need.has_tokenizer_json:
            return [
                f"its corpus {options.corpus} holds text, and there is no tokenizer to read it with"
                " (model.tokenizer_mode): give token ids"
            ]
        if need.num_tokens > PAD:
            return [f"with a corpus it drafts at most {PAD} tokens: set num_tokens to fewer"]
        return []

    def __init__(self, options: SuffixOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self._corpus: Corpus | None = None
        if options.corpus is not None:
            self._corpus = open_corpus(
                options.corpus, setup.tokenizer_json, setup.vocab_size, options.max_corpus_tokens
            )
        self._answers = self._create_store()
        self._num_prompt_tokens: dict[int, int] = {}

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts: list[Draft | None] = []
        for request in batch.requests:
            self._num_prompt_tokens[request.seq_id] = request.num_prompt_tokens
            drafts.append(self._draft(request) if request.max_drafts else None)
        return drafts

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        start = self._num_prompt_tokens.pop(seq_id, None)
        if start is not None:
            self._answers.add(np.asarray(token_ids[start:], dtype=np.int32))

    def forget_finished(self) -> None:
        self._answers = self._create_store()

    def _create_store(self) -> AnswerStore:
        return AnswerStore(self.options.max_cached_tokens, self.options.max_match, self.setup.num_tokens)

    def _draft(self, request: DraftRequest) -> Draft | None:
        suffix = request.token_ids[-self.options.max_match :]
        own = padded(request.token_ids, len(suffix), request.max_drafts)
        guess = self._guess(own, self._own_ends(request.token_ids) + len(suffix), suffix, request.max_drafts)
        for texts in (self._answers, self._corpus):
            if texts is None or (guess is not None and guess.score >= request.max_drafts):
                continue
            other = self._guess(texts.text, texts.ends(suffix), suffix, request.max_drafts)
            if other is not None and (guess is None or other.score > guess.score):
                guess = other
                if texts is self._answers:
                    self._answers.touch(other.place)
        if guess is None:
            return None
        return Draft(guess.token_ids, guess.parents if self.options.tree else None, confidence=guess.confidence())

    def _own_ends(self, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Indices after the latest earlier occurrences of the last token, or pair of tokens, ascending."""
        found = token_ids[:-1] == token_ids[-1]
        if self.options.min_match > 1:
            if len(token_ids) < 2:
                return np.empty(0, dtype=np.int64)
            found = found[1:] & (token_ids[:-2] == token_ids[-2])
        ends = found.nonzero()[0][-MAX_MATCHES:]
        return ends + (2 if self.options.min_match > 1 else 1)

    def _guess(
        self, text: NDArray[np.int32], ends: NDArray[np.int64], suffix: NDArray[np.int32], max_nodes: int
    ) -> Guess | None:
        if len(ends) == 0:
            return None
        return best_guess(
            text,
            ends,
            match_lengths(text, ends, suffix),
            min_match=self.options.min_match,
            max_nodes=max_nodes,
            spec_factor=self.options.max_spec_factor,
            min_prob=self.options.min_token_prob,
            tree=self.options.tree,
        )
