"""Helpers of command plugins: configuration arguments, explanations of a config before weights are read, and printing.

    from dovetail.commands import LayeredConfig, explain, takes_config_option

    @app.command()
    @takes_config_option
    def look(layered: LayeredConfig) -> None:
        explanation = explain(layered)

Public and versioned like a contract. To run an engine, hand `explanation.resolved` to `dovetail.LLMEngine`.

Its modules have more. `.streaming`, `.sampling` and `.adapters`: text that streams to the terminal, `-s key=value`,
`--lora`. `.installed`: the installed plugins and the schema of the config. For commands that measure: `.checks`
(refusals of bad input), `.machine` (the machine of a timing, and its other load), `.datasets` (prompts in the shapes of
public sets), `.http` (servers of OpenAI's API), `.saved` (results read again and compared), `.student` (quantiles of
Student's t), `.arrivals` (arrival times by rates and from traces), `.progress`, `.svg` and `.page` (plots and
self-contained HTML).
"""

from __future__ import annotations

from dovetail.commands.errors import create_console, exit_code, print_error, print_warning
from dovetail.commands.options import takes_config, takes_config_option, takes_model_or_config
from dovetail.config.files import read_file
from dovetail.config.layers import LayeredConfig
from dovetail.config.load import load_config
from dovetail.config.manifest import write_manifest
from dovetail.config.resolved import Component, Decision, ResolvedConfig
from dovetail.contracts.plugin import ContractVersion
from dovetail.engine.dialects import create_dialect
from dovetail.engine.explanation import Explanation, Value, as_data, explain
from dovetail.engine.resolving.server import ResolvedServer, resolve_server
from dovetail.registry.components import create_class
from dovetail.worker.estimate import MemoryEstimate
from dovetail.worker.machine.environment import detect_environment
from dovetail.worker.rank_estimate import RankEstimate, StepMessages

__all__ = [
    "VERSION",
    "Component",
    "Decision",
    "Explanation",
    "LayeredConfig",
    "MemoryEstimate",
    "RankEstimate",
    "ResolvedConfig",
    "ResolvedServer",
    "StepMessages",
    "Value",
    "as_data",
    "create_class",
    "create_console",
    "create_dialect",
    "detect_environment",
    "exit_code",
    "explain",
    "load_config",
    "print_error",
    "print_warning",
    "read_file",
    "resolve_server",
    "takes_config",
    "takes_config_option",
    "takes_model_or_config",
    "write_manifest",
]

VERSION = ContractVersion(1, 10)
"""Version of this package's public modules, shared by all of them."""
