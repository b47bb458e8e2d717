"""Asks a plugin's `check` about a plain need, as a config would."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.dialect import DialectNeed
from dovetail.contracts.draft_length import LengthNeed
from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.grammar import GrammarNeed
from dovetail.contracts.model import ModelFamily, ModelNeed
from dovetail.contracts.needs import uncovered
from dovetail.contracts.operators import OperatorsNeed
from dovetail.contracts.plugin import Environment, Plugin, PluginOptions
from dovetail.contracts.pooling import Pooler, PoolerNeed
from dovetail.contracts.pooling_params import EMBED
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.speculation import AcceptanceNeed, SpeculationNeed
from dovetail.contracts.weight_transport import WeightTransportNeed
from dovetail.contracts.weights import ModelFiles
from dovetail.registry.components import dump_options
from dovetail.registry.entries import Entry

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

NEEDS: dict[str, Callable[[str, str], Any]] = {
    "executor": lambda device, dtype: ExecutorNeed(device),
    "attention_backend": lambda device, dtype: AttentionNeed(device, dtype, 16, frozenset({64})),
    "scheduler": lambda device, dtype: SchedulerLimits(2048, 16, 1024),
    "model_family": lambda device, dtype: ModelNeed(config=_CONFIG, tensor_parallel=1, device_type=device, dtype=dtype),
    "weight_format": lambda device, dtype: ModelFiles("model", Path("model")),
    "quantization": lambda device, dtype: QuantizationNeed(device, dtype, frozenset()),
    "operators": lambda device, dtype: OperatorsNeed(device, dtype),
    "grammar": lambda device, dtype: GrammarNeed(vocab_size=512, has_tokenizer_json=True),
    "draft_worker": lambda device, dtype: SpeculationNeed(device, dtype, 512, 64, 1, 4, num_layers=2),
    "acceptance_rule": lambda device, dtype: AcceptanceNeed(device, 512, 4),
    "draft_length": lambda device, dtype: LengthNeed(num_tokens=4, gives_confidence=True, trees=False),
    "weight_transport": lambda device, dtype: WeightTransportNeed(device),
    "dialect": lambda device, dtype: DialectNeed(
        tools=False,
        reasoning=False,
        grammars=False,
        is_named=False,
        chat_template=None,
        special_tokens=frozenset(),
        architecture="LlamaForCausalLM",
    ),
    "pooler": lambda device, dtype: PoolerNeed(task=EMBED, hidden_size=64, num_labels=2),
}
"""By kind, a need that asks for little: device type and dtype -> the need. Kinds without a need are asked with None."""


def examine_answers(entry: Entry, plugin: type[Plugin]) -> Iterator[Finding]:
    """Findings about a plugin's options and its `check`. It is asked about the first plain need that its capabilities
    cover; one whose options must be given is not asked."""
    try:
        options = plugin.Options()
    except Exception:
        return
    try:
        dump_options(options, entry.label)
    except PluginError as error:
        yield finding("options-cannot-travel", entry.label, str(error))
    for device, dtype in product(("cpu", "cuda"), ("float32", "bfloat16", "float16")):
        need = _need(entry, plugin, device, dtype)
        if need is None or not (is_dataclass(need) and uncovered(plugin.__name__, plugin.capabilities, need)):
            yield from _ask(entry, plugin, need, options, device)
            return


def _need(entry: Entry, plugin: type[Plugin], device: str, dtype: str) -> Any:
    create = NEEDS.get(entry.kind)
    need = create(device, dtype) if create is not None else None
    if isinstance(need, ModelNeed) and issubclass(plugin, ModelFamily) and plugin.architectures:
        return replace(need, config={**_CONFIG, "architectures": [sorted(plugin.architectures)[0]]})
    if isinstance(need, PoolerNeed) and issubclass(plugin, Pooler) and plugin.capabilities.tasks:
        return replace(need, task=sorted(plugin.capabilities.tasks)[0])
    return need


def _ask(entry: Entry, plugin: type[Plugin], need: Any, options: PluginOptions, device: str) -> Iterator[Finding]:
    environment = Environment(device_type=device, num_cpus=4, memory_bytes=8 << 30)
    try:
        returned: object = plugin.check(need, options, environment)
    except Exception as error:
        first = f"{entry.label}: its check raised {type(error).__name__}: {error}"
        yield finding("check-raises", entry.label, f"{first}\n\n{''.join(traceback.format_exception(error)).rstrip()}")
        return
    if not isinstance(returned, list | tuple) or not all(isinstance(reason, str) for reason in returned):
        yield finding("check-returns", entry.label, f"{entry.label}: its check returned {returned!r}")
