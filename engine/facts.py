"""What clients know of an engine, taken from its resolved config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.resolved import Component, ResolvedConfig, ResolvedSpeculation
from dovetail.contracts.engine_client import DialectFacts, EngineFacts, GrammarFacts, PoolingFacts, RuleFacts
from dovetail.contracts.kv_connector import KVConnector
from dovetail.contracts.scheduler import Scheduler
from dovetail.contracts.speculation import AcceptanceRule
from dovetail.engine.resolving.generation import default_sampling
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.registry.components import create_class

_ENCODER = "the model is an encoder, which makes no text: use embed or encode, or serve a model that generates"

_SCORES = (
    "the checkpoint has a score head in place of an output layer, and makes no text: use classify, score, reward or"
    " embed"
)


def engine_facts(
    config: ResolvedConfig,
    scheduler: type[Scheduler],
    acceptance: type[AcceptanceRule] | None,
    tokenizer: Tokenizer | None,
    grammar: GrammarFacts,
) -> EngineFacts:
    """The facts of an engine of these parts."""
    model, speculation = config.model, config.speculation
    drafters = speculation.drafters if speculation is not None else {}
    architectures = model.hf_config.get("architectures") or [""]
    return EngineFacts(
        model=str(config.values["model"]["path"]),
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_logprobs=model.max_logprobs,
        logprobs_mode=model.logprobs_mode,
        max_completions=model.max_completions,
        scheduler=config.scheduler.name,
        has_priorities=scheduler.capabilities.priorities,
        processors=tuple(config.logits_processors),
        drafters=tuple(drafters),
        default_drafter=speculation.default if speculation is not None else None,
        experiments=tuple(experiment.name for experiment in config.experiments),
        acceptance=speculation.acceptance.name if speculation is not None else None,
        rules=_rules(speculation) if speculation is not None else {},
        tree_drafters=frozenset(name for name, one in drafters.items() if one.trees),
        prediction_drafters=frozenset(name for name, one in drafters.items() if one.abilities.reads_prediction),
        accepts_sampling=acceptance is None or acceptance.capabilities.sampling,
        drafts_without_logprobs=speculation is not None and speculation.disable_logprobs,
        default_sampling=default_sampling(model.hf_config.get("generation_config") or {}),
        grammar=grammar,
        block_size=config.cache.block_size,
        prefix_caching=config.cache.prefix_caching,
        architecture=str(architectures[0]),
        max_loras=config.lora.max_loras if config.lora is not None else 0,
        dialect=_dialect_facts(config.dialect, tokenizer),
        pooling=_pooling_facts(config),
        num_token_types=model.size.num_token_types,
        why_not_generate=_why_not_generate(config),
        num_workers=config.num_ranks,
        kv_transfer_params=_transfer_params(config),
    )


def _transfer_params(config: ResolvedConfig) -> dict[str, Any]:
    if config.kv_connector is None:
        return {}
    connector, options = create_class(config.kv_connector.component)
    assert issubclass(connector, KVConnector)
    return dict(connector.transfer_params(options))


def _why_not_generate(config: ResolvedConfig) -> str:
    if config.model.size.is_encoder:
        return _ENCODER
    return _SCORES if config.pooling.num_labels else ""


def _pooling_facts(config: ResolvedConfig) -> PoolingFacts:
    pooling = config.pooling
    return PoolingFacts(
        poolers={task: component.name for task, component in pooling.poolers.items()},
        refusals=pooling.refusals,
        skips_prefix=pooling.skips_prefix,
        hidden_size=config.model.size.hidden_size,
        num_labels=pooling.num_labels,
        labels=_labels(config.model.hf_config, pooling.num_labels),
        normalizes=pooling.normalizes,
    )


def _labels(hf_config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    names = hf_config.get("id2label")
    known = {str(number): str(name) for number, name in names.items()} if isinstance(names, Mapping) else {}
    return tuple(known.get(str(number), f"LABEL_{number}") for number in range(count))


def _rules(speculation: ResolvedSpeculation) -> dict[str, RuleFacts]:
    found = {}
    for name, component in speculation.rules.items():
        rule, _ = create_class(component)
        assert issubclass(rule, AcceptanceRule)
        found[name] = RuleFacts(sampling=rule.capabilities.sampling, trees=rule.capabilities.trees)
    return found


def _dialect_facts(dialect: Component | None, tokenizer: Tokenizer | None) -> DialectFacts | None:
    if dialect is None or tokenizer is None:
        return None
    texts = {token_id: tokenizer.id_to_token(token_id) for token_id in sorted(tokenizer.added_token_ids)}
    return DialectFacts(
        name=dialect.name,
        reference=dialect.reference,
        options=dict(dialect.options),
        special_tokens={text: token_id for token_id, text in texts.items() if text is not None},
        chat_template="\n".join(tokenizer.chat_templates.values()),
    )
