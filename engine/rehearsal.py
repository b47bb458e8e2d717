"""A start without weights: what would be refused once the weights are there, found out on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from dovetail.config.resolved import Component, ResolvedConfig
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, AttentionSetup
from dovetail.contracts.errors import DovetailError, ModelError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import ModelFamily, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.contracts.weights import ModelFiles, WeightFormat
from dovetail.registry.components import create_class

if TYPE_CHECKING:
    import torch

    from dovetail.contracts.attention import AttentionModule


def rehearse(resolved: ResolvedConfig, environment: Environment) -> list[str]:
    """Loads the tokenizer, and builds each model with the names and shapes of its checkpoint's tensors, without memory.

    Raises what a start would raise. Returns warnings: what could not be rehearsed, as it needs numbers.
    """
    _load_tokenizer(resolved)
    model = resolved.model
    target = _Model(
        resolved.model_family, resolved.weight_format, model.files, model.hf_config, model.size, model.max_model_len
    )
    drafters = resolved.speculation.drafters.values() if resolved.speculation is not None else ()
    drafts = [
        _Model(draft.family, draft.weight_format, draft.files, draft.hf_config, draft.size, draft.max_model_len)
        for draft in (drafter.model for drafter in drafters)
        if draft is not None
    ]
    warnings = []
    for ranks, each in [(resolved.tensor_parallel, target), *((1, draft) for draft in drafts)]:
        try:
            layers = _build(each, ranks, resolved.cache.dtype)
            if each is target:
                _check_attention(resolved, layers, environment)
        except DovetailError:
            raise
        except Exception as error:
            # A family may compute with its weights while it takes them, and meta tensors have no numbers.
            warnings.append(
                f"{each.files.path} could not be rehearsed without its weights, so that the start may refuse more: "
                f"{type(error).__name__}: {error}"
            )
    return warnings


@dataclasses.dataclass(frozen=True)
class _Model:
    family: Component
    weight_format: Component
    files: ModelFiles
    hf_config: Mapping[str, Any]
    size: ModelSize
    max_model_len: int


def _load_tokenizer(resolved: ResolvedConfig) -> None:
    from dovetail.engine.tokenization.load import load_tokenizer_of

    plugin, options = create_class(resolved.weight_format)
    model = resolved.model
    weight_format = cast(type[WeightFormat], plugin)(options)
    load_tokenizer_of(weight_format, model.files, model.tokenizer_mode, model.tokenizer)


def _build(model: _Model, ranks: int, kv_dtype: str) -> list[AttentionModule]:
    """Returns the model's attention layers."""
    import torch

    from dovetail.nn.planning import against_size, planning_context

    family, options = create_class(model.family)
    # bfloat16: some of torch's operators know no other dtype on the meta device.
    context = dataclasses.replace(
        planning_context(ranks),
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        max_model_len=model.max_model_len,
    )
    with torch.inference_mode():
        module = cast(type[ModelFamily], family)(options).create(model.hf_config, context)
        module.load_weights(_tensors(model))
        if reasons := against_size(model.family.name, model.size, module, context):
            raise ModelError("; ".join(reasons))
    return context.attention_layers


def _check_attention(resolved: ResolvedConfig, layers: Sequence[AttentionModule], environment: Environment) -> None:
    """The backend was chosen by what the config says, and the layers themselves may ask for more."""
    from dovetail.worker.attention_binding import check_layers

    plugin, options = create_class(resolved.attention)
    groups: dict[KVSpec, list[AttentionLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.cache, []).append(layer.layer)
    for spec, of_group in groups.items():
        setup = AttentionSetup(
            layers=tuple(of_group),
            spec=spec,
            block_size=resolved.cache.block_size,
            dtype=resolved.model.dtype,
            device=resolved.device_type,
            max_num_seqs=resolved.limits.max_num_seqs,
            max_num_batched_tokens=resolved.limits.max_num_batched_tokens,
            max_model_len=resolved.model.max_model_len,
            batch_invariant=resolved.is_strict,
        )
        backend = cast(type[AttentionBackend], plugin)
        check_layers(resolved.attention.name, backend, options, setup, environment, whose="this model's")


def _tensors(model: _Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the checkpoint, without its numbers."""
    import torch

    plugin, options = create_class(model.weight_format)
    reader = cast(type[WeightFormat], plugin)(options).open(model.files)
    try:
        for info in reader.infos():
            yield info.name, torch.empty(info.shape, dtype=torch.bfloat16, device="meta")
    finally:
        reader.close()
