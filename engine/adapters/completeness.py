"""Whether an adapter's file holds every layer that its config targets, as far as that is certain.

A model's blocks are alike: where one block's q_proj has matrices and another's has none, and both are targets, the file
was not written whole. A kind of layer that no block has is not missed: the names of targets are those of the trained
model, whose layers may be fused otherwise than here, and PEFT passes over names that a model has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.contracts.errors import ModelError
from dovetail.engine.adapters.fitting import on_meta
from dovetail.worker.adapters.peft_files import AdapterFiles, Targets, first_few

if TYPE_CHECKING:
    from dovetail.nn.adapters import AdapterSpace


def check_whole(files: AdapterFiles, space: AdapterSpace) -> None:
    """Raises `ModelError` that names layers of the model that the file lacks. `files` fit the model (`check_fit`)."""
    targets = files.targets
    if targets is None:
        return
    held = {name for layer in files.layers for name in _own_names(files, space, layer, layer) or ()}
    missing = [
        absent
        for present, absent in _siblings(files, space)
        if is_targeted(present, targets)
        and is_targeted(absent, targets)
        and (own := _own_names(files, space, present, absent))
        and held.isdisjoint(own)
    ]
    if missing:
        raise ModelError(
            f"{files.path} lacks layers that target_modules names: {first_few(missing)}. The file was"
            " not written whole: save the adapter anew. If they were left out on purpose, list the blocks that it has"
            " in adapter_config.json, as layers_to_transform"
        )


def is_targeted(name: str, targets: Targets) -> bool:
    """Whether PEFT adapts a linear layer of this name: a pattern matches the whole of it, a list has the end of it."""
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _siblings(files: AdapterFiles, space: AdapterSpace) -> Iterator[tuple[str, str]]:
    """Layers of the file, each with names that differ from it in the number of a block only, which the file has not."""
    numbers = {part for name in space.expected() for part in name.split(".") if part.isdigit()}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for name in files.layers:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                pattern = (*parts[:place], "*", *parts[place + 1 :])
                found.setdefault(pattern, {})[part] = name
    for pattern, present in found.items():
        for number in sorted(numbers - present.keys(), key=int):
            yield next(iter(present.values())), ".".join(number if part == "*" else part for part in pattern)


def _own_names(files: AdapterFiles, space: AdapterSpace, present: str, name: str) -> list[str] | None:
    """What the model calls the layer `name`, of the shape of the layer `present`; None where it has no such layer."""
    try:
        found = space.translated({name: on_meta(files.layers[present])})
    except ModelError:
        return None
    expected = space.expected()
    fits = all(expected.get(own) == (given.b.shape[0], given.a.shape[1]) for own, given in found.items())
    return list(found) if fits else None
