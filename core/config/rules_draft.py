"""Rules about what drafters own: a model of their own, and attention layers with a backend of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dovetail.config import rules_checkpoint, rules_model
from dovetail.config.choose import Chosen, choose, choose_or_none
from dovetail.config.layers import LayeredConfig, Origin
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component, ResolvedDrafter, ResolvedDraftModel
from dovetail.config.rules_quantization import choose_quantization
from dovetail.config.schema import ComponentSection, ExecutorSection, ModelSection
from dovetail.config.slots import DRAFT_ATTENTION, DRAFT_QUANTIZATION
from dovetail.config.tree import KeyPath, dotted
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.speculation import DraftModelInfo, DraftWorker, SpeculationNeed
from dovetail.contracts.weights import ModelFiles, WeightFormat


class DraftModelScope:
    """Resolves the model of one drafter by the rules of the target's, with the drafter's options in the place of the
    section `model`."""

    def __init__(self, state: Resolution, path: KeyPath, target: tuple[ModelFiles, WeightFormat, int]):
        self._state = state
        self._path = path
        self._target = target
        self._inner: Resolution | None = None
        self.model: ResolvedDraftModel | None = None
        self.info: DraftModelInfo | None = None

    def resolve(self, asked: Mapping[str, Any]) -> None:
        """Finds the model that is asked for. Raises what the rules raise, with the drafter's key in front."""
        section = _as_section(self._path, asked)
        try:
            self._resolve(section)
        except DovetailError as error:
            raise type(error)(f"{dotted(self._path)}, its own model: {error}") from error

    def apply(self) -> None:
        """Tells the decisions of the rules as the drafter's."""
        if self._inner is not None:
            _tell_decisions(self._inner, self._state, self._path)

    def _resolve(self, section: ModelSection) -> None:
        state = self._inner = _inner_resolution(self._state, self._path, section)
        source, files = rules_model.find_files(state)
        weight_format, opener, hf_config = rules_model.read_config(state, files)
        rules_model.refuse_quantized_checkpoint(opener, hf_config)
        stored = rules_checkpoint.compare(state, opener, files, hf_config)
        hf_config = stored.config
        dtype = rules_model.choose_dtype(state, hf_config)
        family, size = rules_model.choose_family(state, hf_config, dtype)
        rules_checkpoint.refuse_more_than_stored(size, stored, files)
        quantization, packed_formats = choose_quantization(state, family, opener, files, hf_config, dtype)
        self._state.take_warnings(state, dotted(self._path))
        self.info = DraftModelInfo(hf_config, size, dtype, self._difference(files, opener, size.vocab_size))
        self.model = ResolvedDraftModel(
            files=files,
            hf_config=hf_config,
            dtype=dtype,
            size=size,
            max_model_len=size.max_model_len,
            source=source.component,
            weight_format=weight_format.component,
            family=family.component,
            quantization=quantization,
            packed_formats=packed_formats,
        )

    def _difference(self, files: ModelFiles, weight_format: WeightFormat, vocab_size: int) -> str | None:
        """Where the two tokenizers give a token id another meaning."""
        mode = self._state.config.model.tokenizer_mode
        target_files, target_format, target_size = self._target
        own = None if mode == "none" else weight_format.tokenizer(files)
        if own is None:
            return None
        override = rules_model.resolve_tokenizer(self._state)
        load = self._state.inspector.load_vocabulary
        # The format's own tokenizer may be one that cannot be built: it is asked for only where it is used.
        target = load(target_format.tokenizer(target_files) if override is None else None, mode, override)
        draft = load(own, mode)
        if target is None or draft is None:
            return None
        pairs = [(i, target.id_to_token(i), draft.id_to_token(i)) for i in range(min(vocab_size, target_size))]
        different = [pair for pair in pairs if pair[1] != pair[2]]
        if not different:
            return None
        first, theirs, ours = different[0]
        return (
            f"{len(different)} of {len(pairs)} token ids mean other texts, the first of them {first}: {theirs!r} for"
            f" the target, {ours!r} for the draft model"
        )


def _as_section(drafter: KeyPath, asked: Mapping[str, Any]) -> ModelSection:
    """A drafter's options read as keys of the section `model`."""
    try:
        return ModelSection.model_validate(dict(asked))
    except ValidationError as error:
        issues = "; ".join(f"{'.'.join(map(str, i['loc']))}: {i['msg']}" for i in error.errors())
        raise ConfigError(f"{dotted(drafter)}: {issues}") from error


def _inner_resolution(state: Resolution, drafter: KeyPath, section: ModelSection) -> Resolution:
    """One in which a drafter's options stand in the place of the section `model`."""
    outer = state.layered
    config = outer.config.model_copy(update={"model": section, "executor": ExecutorSection()})
    origins: dict[KeyPath, Origin] = {}
    for path, origin in outer.origins.items():
        if path[: len(drafter)] == drafter:
            origins["model", *path[len(drafter) :]] = origin
    return Resolution(LayeredConfig(config, origins), state.registry, state.environment, state.inspector)


def _tell_decisions(inner: Resolution, state: Resolution, drafter: KeyPath) -> None:
    """What was decided about the section `model`, as decisions about the drafter."""
    for decision in inner.decisions:
        key = tuple(decision.key.split("."))[1:]
        # The name of a component stands for it: these options take names.
        key = key[:-1] if key[-1] == "name" else key
        state.decide((*drafter, *key), decision.got, decision.reason, decision.candidates)


def choose_draft_quantization(
    state: Resolution, path: KeyPath, drafter: Chosen[DraftWorker], dtype: str
) -> Component | None:
    """How the layers that a drafter builds by itself hold their weights; None: in full precision."""
    asked = drafter.plugin.quantization(drafter.options)
    if asked is None:
        return None
    section = _as_section(path, {"quantization": asked}).quantization
    assert section is not None
    inner = _inner_resolution(state, path, state.config.model.model_copy(update={"quantization": section}))
    need = QuantizationNeed(state.environment.device_type, dtype)
    otherwise = "no method for drafters serves here"
    try:
        method = choose_or_none(inner, DRAFT_QUANTIZATION, need, otherwise)
    except DovetailError as error:
        raise type(error)(f"{dotted(path)}, its own layers: {error}") from error
    _tell_decisions(inner, state, path)
    state.take_warnings(inner, dotted(path))
    return None if method is None else method.component


def refuse_attention(state: Resolution, path: KeyPath, chosen: Chosen[DraftWorker]) -> None:
    """Raises `ConfigError` for the attention backend of a drafter that has no layers."""
    if not chosen.plugin.capabilities.kv_cache and state.section((*path, "attention")) is not None:
        key = dotted((*path, "attention"))
        raise ConfigError(
            f"{key} ({state.layered.origin(key)}): the drafter {chosen.component.name!r} has no attention layers of its"
            " own; remove it"
        )


def choose_draft_attention(
    state: Resolution,
    path: KeyPath,
    specs: Sequence[KVSpec],
    dtype: str,
    *,
    trees: bool,
) -> Component:
    """The attention backend of a drafter's own layers, which cache `specs`, for queries of `dtype`."""
    need = AttentionNeed(
        device_type=state.environment.device_type,
        dtype=dtype,
        block_size=state.config.cache.block_size,
        head_sizes=frozenset(spec.head_size for spec in specs),
        sliding_window=any(spec.window is not None for spec in specs),
        trees=trees,
        kv_dtype=specs[0].dtype,
    )
    slot = DRAFT_ATTENTION.at(path[-1])
    return choose(state, slot, need, section=state.section(slot.path) or ComponentSection()).component


def draft_caches(chosen: Chosen[DraftWorker], need: SpeculationNeed) -> tuple[KVSpec, ...]:
    """What the drafter's layers will cache; empty for one without layers. Raises `PluginError` for a drafter that
    contradicts itself."""
    if not chosen.plugin.capabilities.kv_cache:
        return ()
    specs = tuple(chosen.plugin.caches(chosen.options, need))
    if not specs:
        raise PluginError(f"drafter {chosen.component.name!r} declares kv_cache, but its caches() names no layer")
    return specs


def hidden_layers(chosen: Chosen[DraftWorker], need: SpeculationNeed) -> tuple[int, ...]:
    """The states between the target's layers that the drafter wants. Raises `ConfigError` where the target's family
    does not hand them out."""
    name = chosen.component.name
    layers = tuple(chosen.plugin.hidden_layers(chosen.options, need))
    if layers and not need.gives_hidden_layers:
        raise ConfigError(
            f"drafter {name!r} needs the states between the target's layers ({', '.join(map(str, layers))}), which the "
            "target's model family does not hand out; choose another drafter, or a family that does "
            "(capability `hidden_layers`)"
        )
    if any(not 0 <= layer <= need.num_layers for layer in layers):
        raise ConfigError(
            f"drafter {name!r} needs the states that enter the target's layers {', '.join(map(str, layers))}; the"
            f" target has {need.num_layers} layers, so the drafter was made for another"
        )
    return layers


def note_lengths(state: Resolution, drafters: Iterable[ResolvedDrafter], max_model_len: int) -> None:
    """Warns of draft models that end before the target does."""
    for drafter in drafters:
        if drafter.model is not None and drafter.model.max_model_len < max_model_len:
            state.warn(
                f"drafter {drafter.name!r} has {drafter.model.max_model_len} positions, the target {max_model_len}: it"
                " drafts nothing beyond them"
            )
