"""The rule about poolers: one for each task that the model can do."""

from __future__ import annotations

from pathlib import Path

from dovetail.config.resolved import Component, ResolvedPooling
from dovetail.config.schema import AUTO
from dovetail.contracts.model import ModelSize
from dovetail.contracts.pooling import PoolerNeed
from dovetail.contracts.pooling_params import CLASSIFY, EMBED, LABEL_TASKS, TASKS, TOKEN_CLASSIFY, TOKEN_EMBED
from dovetail.engine.resolving.choose import Question, go_without
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.sentence import other_modules, stored_mode, stored_normalize
from dovetail.engine.resolving.slots import POOLER

NO_LABELS = "the checkpoint has no score head, from which labels get their scores: serve one that was made to classify"
_EMBEDS = (EMBED, TOKEN_EMBED)
_ENCODER_MODE = "mean"
"""As sentence-transformers pools an encoder whose files say nothing."""


def choose_poolers(state: Resolution, model: ChosenModel) -> ResolvedPooling:
    """A pooler per task; a task that is null, or for which `auto` finds none, is refused when a request asks for it."""
    mode = stored_mode(model.files.path) or (_ENCODER_MODE if model.size.is_encoder else None)
    others = other_modules(model.files.path)
    num_labels = model.num_labels or model.size.num_labels
    poolers: dict[str, Component] = {}
    needs: dict[str, PoolerNeed] = {}
    refusals: dict[str, str] = {}
    skips_prefix = set()
    for task in TASKS:
        slot = POOLER.at(task)
        section = state.section(slot.path)
        if section is None:
            refusals[task] = f"pooling.{task} is null ({state.layered.origin(f'pooling.{task}')}): name a pooler"
            continue
        modes = {EMBED: mode, CLASSIFY: "cls" if model.size.is_encoder else "lasttoken"}
        need = PoolerNeed(task=task, hidden_size=model.size.hidden_size, num_labels=num_labels, mode=modes.get(task))
        if task in _EMBEDS and others:
            refusals[task] = (
                f"modules.json of the checkpoint has {', '.join(others)}, through which embeddings go, and no pooler"
                " does that: use sentence-transformers, or take the module out of modules.json for other embeddings"
            )
            go_without(state, slot.path, section, refusals[task])
            continue
        if (
            task in LABEL_TASKS
            and section.name == AUTO
            and (reason := _without_labels(task, num_labels, model.size)) is not None
        ):
            refusals[task] = reason
            go_without(state, slot.path, section, reason)
            continue
        chosen = Question(state, slot, need).choose_or_none(
            "no installed pooler can be used: such requests are refused"
        )
        if chosen is None:
            refusals[task] = f"no installed pooler serves this model: see pooling.{task} in dovetail explain"
            continue
        poolers[task], needs[task] = chosen.component, need
        if chosen.plugin.capabilities.skips_prefix:
            skips_prefix.add(task)
    normalizes = _normalizes(state, model.files.path)
    return ResolvedPooling(poolers, needs, frozenset(skips_prefix), refusals, num_labels, normalizes)


def _without_labels(task: str, num_labels: int, size: ModelSize) -> str | None:
    """Why a task that needs labels is refused unless a pooler is named for it."""
    if not num_labels:
        return NO_LABELS
    if task == TOKEN_CLASSIFY and size.is_encoder:
        return "an encoder's score head is made for the state of its first token; ask for classify"
    return None


def _normalizes(state: Resolution, path: Path) -> bool:
    asked = state.config.pooling.normalize
    if asked is not None:
        return asked
    stored = stored_normalize(path)
    reason = "no file of the checkpoint says otherwise"
    if stored is not None:
        reason = f"modules.json of the checkpoint names {'a' if stored else 'no'} module Normalize"
    state.decide("pooling.normalize", stored is not False, reason)
    return stored is not False
