"""Predicted outputs: drafts what the request itself expects, such as the file that an edit changes in a few places.

OpenAI's "Predicted Outputs", and the reference of Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487),
given with the request in place of being searched in its prompt.

The drafter follows the prediction as long as the output does. Where they part it looks for the place at which they come
together again: the longest match of the last output tokens, of equally long ones the nearest to where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftBatch, DraftCapabilities, DraftRequest, DraftSetup, DraftWorker
from dovetail.spec_decode.matching import match_lengths, padded


class PredictionOptions(PluginOptions):
    """Options of `prediction`: how an output finds back to its prediction."""

    min_match: int = Field(default=3, ge=1)
    """Fewest last tokens of the output that must agree with the prediction somewhere else than where it was followed.
    Within `nearby` tokens after that place one token is enough."""
    max_match: int = Field(default=16, ge=1)
    """Longer matches count as this long."""
    nearby: int = Field(default=16, ge=0)
    """An edit that changes at most so many tokens of the prediction is passed as soon as one token agrees."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match ({self.min_match}) must not exceed max_match ({self.max_match})")
        return self


@dataclass(slots=True)
class _Place:
    """Where the output of a request is in its prediction."""

    num_known: int
    """Known tokens of the request when this was found."""
    next: int = 0
    """Index in the prediction of the token that comes next."""
    follows: bool = True
    """Whether output and prediction agree there."""


class PredictionDrafter(DraftWorker):
    """Needs no weights. Guesses are not draws, so a seeded request keeps its tokens. A request without a prediction
    gets no drafts: name it as the first stage of a `cascade` to have another drafter for those."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = PredictionOptions
    capabilities = DraftCapabilities(tensor_parallel=None, reads_prediction=True)
    options: PredictionOptions

    def __init__(self, options: PredictionOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self._places: dict[int, _Place] = {}

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [None if request.prediction is None else self._draft(request) for request in batch.requests]

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._places.pop(seq_id, None)

    def _draft(self, request: DraftRequest) -> Draft | None:
        prediction = request.prediction
        assert prediction is not None
        place = self._places.setdefault(request.seq_id, _Place(request.num_prompt_tokens))
        self._advance(place, prediction, request)
        guess: list[int] = prediction[place.next : place.next + request.max_drafts].tolist() if place.follows else []
        return Draft(guess, from_prediction=True) if guess else None

    def _advance(self, place: _Place, prediction: NDArray[np.int32], request: DraftRequest) -> None:
        """Takes in the tokens that became known since the last call."""
        new = request.token_ids[place.num_known :]
        if not len(new):
            return
        place.num_known = len(request.token_ids)
        expected = prediction[place.next : place.next + len(new)]
        if place.follows and len(expected) == len(new) and bool((expected == new).all()):
            place.next += len(new)
            return
        if place.follows:
            # What agreed of the new tokens moves the place, from which the way back is measured.
            agrees = expected == new[: len(expected)]
            place.next += int(agrees.argmin()) if not agrees.all() else len(expected)
        found = self._find(prediction, request.token_ids[request.num_prompt_tokens :], place.next)
        place.follows = found is not None
        if found is not None:
            place.next = found

    def _find(self, prediction: NDArray[np.int32], output: NDArray[np.int32], near: int) -> int | None:
        """Index after the best match of the last output tokens in the prediction."""
        suffix = output[-self.options.max_match :]
        ends = (prediction == suffix[-1]).nonzero()[0] + 1
        if not len(ends):
            return None
        lengths = match_lengths(padded(prediction, len(suffix), 0), ends + len(suffix), suffix)
        ahead = ends - near
        enough = (lengths >= self.options.min_match) | ((ahead > 0) & (ahead <= self.options.nearby))
        if not enough.any():
            return None
        ends, lengths, ahead = ends[enough], lengths[enough], ahead[enough]
        best = np.lexsort((np.abs(ahead), -lengths))[0]
        return int(ends[best])
