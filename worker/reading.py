"""Builds a model and reads its weights, or what an earlier start kept of them; and reads them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.config.resolved import Component
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelSize
from dovetail.contracts.weights import ModelFiles, WeightReader
from dovetail.nn.context import BuildContext
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.planning import against_size
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.activity import activity
from dovetail.worker.machine.free_memory import give_back_free_memory
from dovetail.worker.pooling.head import ScoreHead


@dataclass(frozen=True)
class CheckpointMarks:
    """What tells a checkpoint from one that replaced it: path, size and time of writing of each of its files."""

    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, reader: WeightReader) -> CheckpointMarks:
        """As the files are now; nothing where the format does not name them."""
        stats = [(path, path.stat()) for path in reader.files()]
        return cls(tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats))

    def changed_files(self, before: CheckpointMarks) -> list[str]:
        """Paths that were not there before, are gone, or were written anew."""
        return sorted({path for path, _, _ in set(self.files) ^ set(before.files)})


def read_module(
    plugins: LoadedPlugins,
    family: Component,
    hf_config: Mapping[str, Any],
    size: ModelSize,
    context: BuildContext,
    weight_format: Component,
    files: ModelFiles,
    head: ScoreHead | None = None,
) -> tuple[CausalLM, CheckpointMarks]:
    """The model with its weights, and what these were read from. Raises `ModelError`, also for a model of another
    `size` than its family said. `head`: reads its own tensor among them."""
    with torch.inference_mode():
        model: CausalLM = plugins.create(family).create(hf_config, context)
        marks = _read(plugins, model, context, weight_format, files, context.keeper, head)
        if reasons := against_size(family.name, size, model, context):
            raise ModelError("; ".join(reasons))
    return model, marks


def read_parts(
    plugins: LoadedPlugins, module: CausalLM, context: BuildContext, weight_format: Component, files: ModelFiles
) -> None:
    """The weights of some parts of a model, which pass over those of the others. Raises `ModelError`."""
    with torch.inference_mode():
        _read(plugins, module, context, weight_format, files, None, None)


def read_weights(
    plugins: LoadedPlugins,
    model: CausalLM,
    context: BuildContext,
    weight_format: Component,
    files: ModelFiles,
    head: ScoreHead | None = None,
) -> CheckpointMarks:
    """The weights of a model that had them before and gave their memory back. Raises `ModelError`."""
    with torch.inference_mode():
        return _read(plugins, model, context, weight_format, files, None, head)


def _read(
    plugins: LoadedPlugins,
    model: CausalLM,
    context: BuildContext,
    weight_format: Component,
    files: ModelFiles,
    keeper: KernelKeeper | None,
    head: ScoreHead | None,
) -> CheckpointMarks:
    """Kernels come from `keeper` where it has them, and are kept by it otherwise."""
    key = None
    reader = plugins.create(weight_format).open(files)
    try:
        marks = CheckpointMarks.of(reader)
        if keeper is not None:
            key = keeper.restore(reader.files())
        tensors = reader.tensors(_packed_formats(context, reader, keeper))
        model.load_weights(tensors if head is None else head.sift(tensors))
    finally:
        reader.close()
    if keeper is not None and key is not None:
        with activity("keeping packed weights on disk, so that later starts need not pack them"):
            keeper.keep(key)
    give_back_free_memory()
    return marks


def current_marks(plugins: LoadedPlugins, weight_format: Component, files: ModelFiles) -> CheckpointMarks:
    """Of the checkpoint that is there now. Raises `ModelError`."""
    reader = plugins.create(weight_format).open(files)
    try:
        return CheckpointMarks.of(reader)
    finally:
        reader.close()


def _packed_formats(context: BuildContext, reader: WeightReader, keeper: KernelKeeper | None) -> frozenset[str]:
    """Formats in which weights may come packed: those that the quantization method holds, and, since restored kernels
    pass over what they are given, all of them where nothing has to be cut out of packed rows."""
    if keeper is not None and keeper.is_restored and context.tp_size == 1:
        return reader.packed_formats()
    return context.quantization.capabilities.packed_formats if context.quantization is not None else frozenset()
