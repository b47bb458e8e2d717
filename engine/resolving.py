"""From a config to what will run: the rules of `dovetail.config` with this machine, its plugins, and what looks into a
checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dovetail.activity import activity
from dovetail.config.layers import LayeredConfig
from dovetail.config.resolution import Resolution, Vocabulary
from dovetail.config.resolve import run_rules
from dovetail.config.resolved import ResolvedConfig
from dovetail.config.schema import AUTO
from dovetail.contracts.layer_plan import LayerPlan
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import Environment
from dovetail.contracts.weights import TokenizerFiles
from dovetail.registry.environment import detect_environment
from dovetail.registry.registry import Registry

logger = logging.getLogger("dovetail.config")


class CheckpointInspector:
    """Looks with `dovetail.nn` and the engine's tokenizers, which it imports when it is asked."""

    def plan_layers(self, family: ModelFamily, hf_config: Mapping[str, Any], tensor_parallel: int) -> LayerPlan:
        """As `Inspector.plan_layers`."""
        from dovetail.nn.layer_plan import plan_layers  # takes torch along, which most commands do without

        return plan_layers(family, hf_config, tensor_parallel=tensor_parallel)

    def load_vocabulary(
        self, files: TokenizerFiles | None, mode: str, override_directory: str | None = None
    ) -> Vocabulary | None:
        """As `Inspector.load_vocabulary`."""
        from dovetail.engine.tokenization import load_tokenizer

        return load_tokenizer(files, mode, override_directory)


def resolve(
    layered: LayeredConfig, registry: Registry | None = None, environment: Environment | None = None
) -> ResolvedConfig:
    """Makes every choice and fills every value. Logs what is odd and stops nothing.

    `registry` and `environment` default to what is installed and to this machine.
    Raises `ConfigError` for what is refused, `PluginError` for a named plugin that cannot be loaded, `ModelError`
    for a model that is not there or that nothing can build.
    """
    with activity("choosing components"):
        resolved = run_rules(create_resolution(layered, registry, environment))
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    return resolved


def create_resolution(
    layered: LayeredConfig, registry: Registry | None = None, environment: Environment | None = None
) -> Resolution:
    """A resolution that has not begun."""
    if environment is None:
        device = layered.config.device
        environment = detect_environment(None if device == AUTO else device)
    registry = registry if registry is not None else Registry.scan()
    return Resolution(layered, registry, environment, CheckpointInspector())
