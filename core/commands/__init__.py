"""What a command plugin works with: how the other commands take a configuration, what they know of it before weights
are read, and how they print.

    from dovetail.commands import LayeredConfig, explain, takes_config_option

    @app.command()
    @takes_config_option
    def look(layered: LayeredConfig) -> None:
        explanation = explain(layered)

Public and versioned like a contract. To run an engine, hand `explanation.resolved` to `dovetail.LLMEngine`.

Commands that measure find more beside it: `dovetail.commands.checks` (refusals of bad input), `.machine` (what a timing
was taken on, and what else ran meanwhile), `.progress`, `.svg` and `.page` (plots and self-contained HTML).
"""

from __future__ import annotations

from dovetail.cli.errors import create_console, print_warning
from dovetail.cli.options import takes_config, takes_config_option
from dovetail.config.explanation import Explanation, explain
from dovetail.config.layers import LayeredConfig
from dovetail.config.load import load_config
from dovetail.config.resolved import Component, ResolvedConfig
from dovetail.registry.components import create_class
from dovetail.registry.environment import detect_environment

__all__ = [
    "Component",
    "Explanation",
    "LayeredConfig",
    "ResolvedConfig",
    "create_class",
    "create_console",
    "detect_environment",
    "explain",
    "load_config",
    "print_warning",
    "takes_config",
    "takes_config_option",
]
