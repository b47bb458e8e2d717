"""The rule about poolers: one for each task that the model can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.config.resolved import Component, ResolvedPooling
from dovetail.config.schema import AUTO
from dovetail.contracts.pooling import PoolerNeed
from dovetail.contracts.pooling_params import LABEL_TASKS, TASKS
from dovetail.engine.resolving.choose import Question, go_without
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.sentence import read_json
from dovetail.engine.resolving.slots import POOLER

NO_LABELS = "the checkpoint has no score head, from which labels get their scores: serve one that was made to classify"
_MODULES, _POOLING = "modules.json", "pooling_mode_"
_ONLY_EMBEDS = "embed"
_OF_ENCODERS = "mean"
"""What sentence-transformers takes where an encoder's files say nothing."""


def choose_poolers(state: Resolution, model: ChosenModel) -> ResolvedPooling:
    """A pooler per task; a task that is null, or for which `auto` finds none, is refused when a request asks for it."""
    mode = stored_mode(model.files.path) or (_OF_ENCODERS if model.size.is_encoder else None)
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
        need = PoolerNeed(
            task=task,
            hidden_size=model.size.hidden_size,
            num_labels=model.num_labels,
            mode=mode if task == _ONLY_EMBEDS else None,
        )
        if task in LABEL_TASKS and not model.num_labels and section.name == AUTO:
            refusals[task] = NO_LABELS
            go_without(state, slot.path, section, NO_LABELS)
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
    return ResolvedPooling(poolers, needs, frozenset(skips_prefix), refusals, model.num_labels)


def stored_mode(path: Path) -> str | None:
    """How the files of sentence-transformers say that states are pooled ("mean", "cls", "lasttoken", ...): modules.json
    names the folder of a pooling module, whose config has one `pooling_mode_...` that is true. None where they say
    nothing; several modes, whose vectors would be joined, are one name that no pooler has."""
    modules = read_json(path / _MODULES) if path.is_dir() else None
    for module in modules if isinstance(modules, list) else ():
        if not isinstance(module, dict) or not str(module.get("type", "")).endswith("Pooling"):
            continue
        config = read_json(path / str(module.get("path", "")) / "config.json")
        if isinstance(config, dict):
            return _mode_of(config)
    return None


def _mode_of(config: dict[str, Any]) -> str | None:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        return named
    chosen = [key.removeprefix(_POOLING) for key, value in config.items() if key.startswith(_POOLING) and value is True]
    modes = [mode.removesuffix("_tokens").removesuffix("_token") for mode in chosen]
    return "+".join(modes) or None
