"""Builds a model and reads its weights, or what an earlier start kept of them; and reads them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.activity import activity
from dovetail.config.resolved import Component
from dovetail.contracts.model import CausalLM
from dovetail.contracts.weights import ModelFiles, WeightReader
from dovetail.nn.context import ModelContext
from dovetail.nn.free_memory import give_back_free_memory
from dovetail.nn.kept_kernels import KernelKeeper
from dovetail.registry.bootstrap import LoadedPlugins


def read_module(
    plugins: LoadedPlugins,
    family: Component,
    hf_config: Mapping[str, Any],
    context: ModelContext,
    weight_format: Component,
    files: ModelFiles,
) -> CausalLM:
    """The model with its weights. Raises `ModelError`."""
    with torch.inference_mode():
        model: CausalLM = plugins.create(family).create(hf_config, context)
        _read(plugins, model, context, weight_format, files, context.keeper)
    return model


def read_weights(
    plugins: LoadedPlugins, model: CausalLM, context: ModelContext, weight_format: Component, files: ModelFiles
) -> None:
    """The weights of a model that had them before and gave their memory back. Raises `ModelError`."""
    with torch.inference_mode():
        _read(plugins, model, context, weight_format, files, None)


def _read(
    plugins: LoadedPlugins,
    model: CausalLM,
    context: ModelContext,
    weight_format: Component,
    files: ModelFiles,
    keeper: KernelKeeper | None,
) -> None:
    """Kernels come from `keeper` where it has them, and are kept by it otherwise."""
    key = None
    reader = plugins.create(weight_format).open(files)
    try:
        if keeper is not None:
            key = keeper.restore(reader.files())
        model.load_weights(reader.tensors(_packed_formats(context, reader, keeper)))
    finally:
        reader.close()
    if keeper is not None and key is not None:
        with activity("keeping packed weights on disk, so that later starts need not pack them"):
            keeper.keep(key)
    give_back_free_memory()


def _packed_formats(context: ModelContext, reader: WeightReader, keeper: KernelKeeper | None) -> frozenset[str]:
    """Formats in which weights may come packed: those that the quantization method holds, and, since restored kernels
    pass over what they are given, all of them where nothing has to be cut out of packed rows."""
    if keeper is not None and keeper.is_restored and context.tp_size == 1:
        return reader.packed_formats()
    return context.quantization.holds if context.quantization is not None else frozenset()
