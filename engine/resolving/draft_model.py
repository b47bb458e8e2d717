"""The model of a drafter, by the rules of the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dovetail.config.resolved import ResolvedDraftModel
from dovetail.config.schema import ModelSection
from dovetail.config.tree import KeyPath, dotted
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.contracts.speculation import DraftModelInfo
from dovetail.engine.resolving.model import ChosenModel, choose_model
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.tokenizer import resolve_tokenizer


class DraftModelScope:
    """Resolves the model of one drafter by the rules of the target's, with the drafter's options in the place of the
    section `model`."""

    def __init__(self, state: Resolution, path: KeyPath, target: ChosenModel):
        self._state = state
        self._path = path
        self._target = target
        self._inner: Resolution | None = None
        self.model: ResolvedDraftModel | None = None
        self.info: DraftModelInfo | None = None

    def resolve(self, asked: Mapping[str, Any]) -> None:
        """Finds the model that is asked for. Raises what the rules raise, with the drafter's key in front."""
        section = as_model_section(self._path, asked)
        try:
            self._resolve(section)
        except DovetailError as error:
            raise type(error)(f"{dotted(self._path)}, its own model: {error}") from error

    def apply(self) -> None:
        """Notes the decisions of the rules as the drafter's."""
        if self._inner is not None:
            self._state.adopt_decisions(self._inner, self._path)

    def _resolve(self, section: ModelSection) -> None:
        state = self._inner = self._state.within(self._path, section)
        model = choose_model(state)
        self._state.take_warnings(state, dotted(self._path))
        self.info = DraftModelInfo(model.hf_config, model.size, model.dtype, self._difference(model))
        self.model = ResolvedDraftModel(
            files=model.files,
            hf_config=model.hf_config,
            dtype=model.dtype,
            size=model.size,
            max_model_len=model.size.max_model_len,
            source=model.source,
            weight_format=model.weight_format,
            family=model.family.component,
            quantization=model.quantization,
            packed_formats=model.packed_formats,
        )

    def _difference(self, model: ChosenModel) -> str | None:
        """Where the two tokenizers give a token id another meaning."""
        mode, target = self._state.config.model.tokenizer_mode, self._target
        own = None if mode == "none" else model.opener.tokenizer(model.files)
        if own is None:
            return None
        # Brings the library `tokenizers` along, which most commands do without.
        from dovetail.engine.tokenization.load import load_tokenizer, load_tokenizer_of

        theirs = load_tokenizer_of(target.opener, target.files, mode, resolve_tokenizer(self._state))
        ours = load_tokenizer(own, mode)
        if theirs is None or ours is None:
            return None
        both = range(min(model.size.vocab_size, target.size.vocab_size))
        pairs = [(i, theirs.id_to_token(i), ours.id_to_token(i)) for i in both]
        different = [pair for pair in pairs if pair[1] != pair[2]]
        if not different:
            return None
        first, target_text, draft_text = different[0]
        return (
            f"{len(different)} of {len(pairs)} token ids mean other texts, the first of them {first}: {target_text!r}"
            f" for the target, {draft_text!r} for the draft model"
        )


def as_model_section(drafter: KeyPath, asked: Mapping[str, Any]) -> ModelSection:
    """A drafter's options read as keys of the section `model`."""
    try:
        return ModelSection.model_validate(dict(asked))
    except ValidationError as error:
        issues = "; ".join(f"{'.'.join(map(str, i['loc']))}: {i['msg']}" for i in error.errors())
        raise ConfigError(f"{dotted(drafter)}: {issues}") from error
