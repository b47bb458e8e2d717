"""The rule about the dialect: which one recognizes the model's chat template."""

from __future__ import annotations

from pathlib import Path

from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO
from dovetail.contracts.dialect import DialectNeed
from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.resolving.choose import Question
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import DIALECT, architectures_of
from dovetail.engine.tokenization.signs import ChatSigns, read_signs


def choose_dialect(state: Resolution, model: ChosenModel, chat_template: str | None) -> Component | None:
    """The dialect that the config names, or the first that recognizes the model; None where the config has null, or
    none can be used. Call it once the tokenizer's directory is resolved. `chat_template`: the config's, in place of the
    model's own."""
    section = state.section(DIALECT.path)
    if section is None:
        return None
    signs = _signs(state, model)
    need = DialectNeed(
        tools=False,
        reasoning=False,
        grammars=False,
        is_named=section.name != AUTO,
        chat_template=chat_template or signs.chat_template,
        special_tokens=signs.added_tokens,
        architecture=next(iter(architectures_of(model.hf_config)), ""),
    )
    chosen = Question(state, DIALECT, need).choose_or_none("no installed plugin can be used: chats are refused")
    return None if chosen is None else chosen.component


def _signs(state: Resolution, model: ChosenModel) -> ChatSigns:
    section = state.config.model
    if section.tokenizer_mode == "none":
        return ChatSigns()
    try:
        if section.tokenizer is not None:
            directory = state.layered.base_dir("model.tokenizer") / Path(section.tokenizer).expanduser()
            return read_signs(TokenizerFiles(directory=directory))
        files = model.opener.tokenizer(model.files)
        return read_signs(files) if files is not None else ChatSigns()
    except ModelError:
        # The engine's start says what is wrong with the tokenizer; configs are explained without it.
        return ChatSigns()
