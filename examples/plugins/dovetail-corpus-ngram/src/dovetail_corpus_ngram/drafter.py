"""`corpus_ngram`: guesses what most often followed the last tokens in a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

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
    ReadsTokenizer,
    SpeculationNeed,
)
from dovetail_corpus_ngram.corpus import IDS, against, read_documents
from dovetail_corpus_ngram.index import END, CorpusIndex, Places


class CorpusOptions(PluginOptions):
    """Options of `corpus_ngram`: which corpus, and what counts as a guess."""

    path: Path
    """A file of text (.txt, .md), of documents in JSON (.jsonl, objects with `text`), or of token ids (.npy)."""
    min_match: int = Field(default=3, ge=1)
    """Tokens at the end of a request that must occur in the corpus, at least."""
    max_match: int = Field(default=8, ge=1)
    """Longest match that is looked for; the longest that exists is taken."""
    min_probability: float = Field(default=0.1, ge=0, le=1)
    """A guess ends before a token that followed in less than this share of places."""
    max_tokens: int = Field(default=16_000_000, ge=1)
    """Larger corpora are refused: the index takes 8 bytes a token, and building it 50."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match ({self.min_match}) must not exceed max_match ({self.max_match})")
        return self


class CorpusNgram(ReadsTokenizer):
    """Looks the last tokens up in a suffix array of the corpus (REST: He et al. 2024, arXiv 2311.08252, section 3).
    What it proposes is the most frequent continuation and no draw, so a draft is accepted with the target's own
    probability."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = CorpusOptions
    stability = "experimental"
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True, confidence=True)
    options: CorpusOptions

    @classmethod
    def check(cls, need: SpeculationNeed, options: CorpusOptions, environment: Environment) -> list[str]:
        """Whether the file is there, and can be cut into tokens."""
        return against(options.path, need.has_tokenizer_json)

    @classmethod
    def reads_tokenizer(cls, options: CorpusOptions) -> bool:
        """Of a corpus of text."""
        return options.path.suffix != IDS

    def __init__(self, options: CorpusOptions, setup: DraftSetup):
        super().__init__(options, setup)
        documents = read_documents(options.path, setup.tokenizer_json)
        size = sum(map(len, documents))
        if size > options.max_tokens:
            raise ConfigError(
                f"{options.path} has {size:,} tokens; raise `max_tokens` ({options.max_tokens:,}), or cut it"
            )
        if not size:
            raise ConfigError(f"{options.path} has no tokens")
        largest = max(int(document.max()) for document in documents if len(document))
        if largest >= setup.vocab_size:
            raise ConfigError(
                f"{options.path} has token {largest}, and the model has {setup.vocab_size}: it is of another model"
            )
        self.index = CorpusIndex(documents, options.max_match + setup.num_tokens)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [self.guess(request) for request in batch.requests]

    def guess(self, request: DraftRequest) -> Draft | None:
        """Returns the draft for one request, which may be shorter than `max_drafts`."""
        places = self._match(request.token_ids) if request.max_drafts else None
        if places is None:
            return None
        token_ids: list[int] = []
        confidence: list[float] = []
        while len(token_ids) < request.max_drafts:
            token = self.index.likeliest(places)
            if token == END:
                break
            following = self.index.narrowed(places, token)
            # As if one place more went on otherwise: what happened once need not happen again.
            probability = len(following) / (len(places) + 1)
            if probability < self.options.min_probability:
                break
            token_ids.append(token)
            confidence.append(probability)
            places = following
        return Draft(token_ids, confidence=confidence) if token_ids else None

    def _match(self, token_ids: NDArray[np.int32]) -> Places | None:
        """The places of the longest tail of `token_ids` that the corpus has."""
        tail: list[int] = token_ids[-self.options.max_match :].tolist()
        for start in range(len(tail) - self.options.min_match + 1):
            if places := self.index.find(tail[start:]):
                return places
        return None
