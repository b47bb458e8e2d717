"""Among which engines blocks of the KV cache may be exchanged."""

from __future__ import annotations

import json
from hashlib import blake2b

from dovetail.config.resolved import Component, ResolvedConfig
from dovetail.engine.kv.hashing import DIGEST_BYTES, PagesIdentity


def exchange_namespace(config: ResolvedConfig, pages: PagesIdentity) -> bytes:
    """32 bytes: equal where two engines' blocks with the same hash hold the same numbers in the same places.

    `pages` says what changes while an engine runs, and what its files are; the rest is constant within one engine, and
    so no part of it: the model's config with what overrides it, options of plugins, drafters with pages of their own.
    """
    used = (config.model_family, config.weight_format, config.quantization, config.attention, config.operators)
    facts = [
        pages.digest.hex(),
        config.device_type,
        config.reproducibility,
        config.model.hf_config,
        [_facts(component) for component in used if component is not None],
        _drafters(config),
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"dovetail-kv").digest()


def _drafters(config: ResolvedConfig) -> list[object]:
    if config.speculation is None:
        return []
    return [
        [name, str(drafter.model.files.path) if drafter.model is not None else "", *map(_facts, components)]
        for name, drafter in sorted(config.speculation.drafters.items())
        if drafter.kv_cache and (components := list(drafter.components_by_path().values()))
    ]


def _facts(component: Component) -> list[object]:
    return [component.kind, component.reference, component.version, dict(component.options)]
