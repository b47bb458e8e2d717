"""Whole copies of the target's embedding and output layer, on the rank that drafts, for drafters that call them where
ranks share these parts or another pipeline stage has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.draft_target import TargetParts
from dovetail.contracts.errors import PluginError
from dovetail.contracts.model import CausalLM
from dovetail.nn.communicator import SingleProcess
from dovetail.nn.context import BuildContext
from dovetail.nn.stages import StagedCausalLM
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.reading import read_parts

Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TargetCopy:
    """The copied parts, with their weights."""

    module: CausalLM
    """The target without its decoder layers, as one rank has it: quantized as the target would be."""
    context: BuildContext
    """The one in which it was built."""
    parts: TargetParts


def load_copy(
    config: ResolvedConfig, plugins: LoadedPlugins, model: CausalLM, context: BuildContext
) -> TargetCopy | None:
    """The copies that this config's drafters need, for the rank that drafts; None where they need none. `model` and
    `context`: the target's. Raises `ModelError`."""
    parts = config.copied_parts
    if not parts:
        return None
    own = replace(
        context,
        communicator=SingleProcess(),
        keeper=None,
        adapters=None,  # drafters guess with the base model
        layers=range(0),
        is_first_stage=parts.embedding,
        is_last_stage=parts.output,
    )
    with torch.inference_mode():
        module: CausalLM = plugins.create(config.model_family).create(config.model.hf_config, own)
    _share_table(module, model, context)
    read_parts(plugins, module, own, config.weight_format, config.model.files)
    return TargetCopy(module, own, parts)


def _share_table(copy: CausalLM, model: CausalLM, context: BuildContext) -> None:
    """A last stage whose output layer is tied to the embedding has the whole table already, and keeps it once."""
    if context.tp_size > 1 or not (isinstance(copy, StagedCausalLM) and isinstance(model, StagedCausalLM)):
        return
    if copy.embed_tokens is not None and model.embed_tokens is not None:
        copy.embed_tokens = model.embed_tokens


def target_calls(model: CausalLM, context: BuildContext, copy: TargetCopy | None) -> tuple[Call, Call]:
    """`DraftSetup.embed` and `DraftSetup.compute_logits`."""
    parts = TargetParts() if copy is None else copy.parts
    embed = model.embed if context.tp_size == 1 and context.is_first_stage else _refusal("embed", "embedding")
    output = model.compute_logits if context.tp_size == 1 else _refusal("compute_logits", "output")
    if copy is not None and parts.embedding:
        embed = copy.module.embed
    if copy is not None and parts.output:
        output = copy.module.compute_logits
    return embed, output


def _refusal(function: str, part: str) -> Call:
    """A drafter runs on one rank alone, and may not call what other ranks take part in."""

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise PluginError(
            f"DraftSetup.{function} needs other ranks, and drafters run on one: the drafter must be a CallsTarget whose"
            f" target_parts() names {part!r}, so that this rank holds a copy; or set executor.tensor_parallel and"
            " executor.pipeline_parallel to 1, or choose a drafter that does without it"
        )

    return refuse
