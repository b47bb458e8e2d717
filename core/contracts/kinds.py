"""The plugin kinds, their entry-point groups and the contract versions that this host speaks.

This table is the machine-readable list of the public surface.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.contracts.plugin import ContractVersion


@dataclass(frozen=True)
class Kind:
    """One kind of named component."""

    name: str
    base: str
    """Import path of the abstract base class, "module:Class"; importing it is only needed to load a plugin."""
    version: ContractVersion
    summary: str
    need: str | None = None
    """Import path of the kind's need record, "module:Class"; None: the kind has none."""

    @property
    def group(self) -> str:
        """Entry-point group of the major version that this host speaks."""
        return f"dovetail.{self.name}.v{self.version.major}"


_V1 = ContractVersion(1, 0)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "executor",
            "dovetail.contracts.executor:Executor",
            ContractVersion(1, 9),
            "where workers run and how steps reach them",
            "dovetail.contracts.executor:ExecutorNeed",
        ),
        Kind(
            "attention_backend",
            "dovetail.contracts.attention:AttentionBackend",
            ContractVersion(1, 2),
            "the KV page layout and attention over it",
            "dovetail.contracts.attention:AttentionNeed",
        ),
        Kind(
            "scheduler",
            "dovetail.contracts.scheduler:Scheduler",
            _V1,
            "which requests run next, and which are preempted",
            "dovetail.contracts.scheduler:SchedulerLimits",
        ),
        Kind(
            "model_family",
            "dovetail.contracts.model:ModelFamily",
            ContractVersion(1, 7),
            "a config to a module that calls attention",
            "dovetail.contracts.model:ModelNeed",
        ),
        Kind(
            "weight_format",
            "dovetail.contracts.weights:WeightFormat",
            _V1,
            "named tensors from a path, lazily",
            "dovetail.contracts.weights:ModelFiles",
        ),
        Kind(
            "weight_transport",
            "dovetail.contracts.weight_transport:WeightTransport",
            _V1,
            "how workers receive new weights",
            "dovetail.contracts.weight_transport:WeightTransportNeed",
        ),
        Kind("model_source", "dovetail.contracts.weights:ModelSource", _V1, "a model reference to local files"),
        Kind(
            "quantization",
            "dovetail.contracts.quantization:QuantizationMethod",
            ContractVersion(1, 1),
            "how a linear layer's weights are held and multiplied",
            "dovetail.contracts.quantization:QuantizationNeed",
        ),
        Kind(
            "operators",
            "dovetail.contracts.operators:Operators",
            ContractVersion(1, 3),
            "the small operators between linear layers",
            "dovetail.contracts.operators:OperatorsNeed",
        ),
        Kind(
            "logits_processor",
            "dovetail.contracts.logits:LogitsProcessor",
            ContractVersion(1, 1),
            "what may be sampled",
        ),
        Kind(
            "pooler",
            "dovetail.contracts.pooling:Pooler",
            _V1,
            "how a prompt's hidden states become one result",
            "dovetail.contracts.pooling:PoolerNeed",
        ),
        Kind(
            "grammar",
            "dovetail.contracts.grammar:Grammar",
            _V1,
            "which tokens keep an output in a given form",
            "dovetail.contracts.grammar:GrammarNeed",
        ),
        Kind(
            "draft_worker",
            "dovetail.contracts.speculation:DraftWorker",
            ContractVersion(1, 4),
            "guessed tokens, chain or tree",
            "dovetail.contracts.speculation:SpeculationNeed",
        ),
        Kind(
            "acceptance_rule",
            "dovetail.contracts.speculation:AcceptanceRule",
            ContractVersion(1, 2),
            "which drafts are accepted",
            "dovetail.contracts.speculation:AcceptanceNeed",
        ),
        Kind(
            "draft_length",
            "dovetail.contracts.draft_length:DraftLength",
            ContractVersion(1, 1),
            "how many drafts are asked for and verified",
            "dovetail.contracts.draft_length:LengthNeed",
        ),
        Kind("route", "dovetail.contracts.route:Route", ContractVersion(1, 9), "endpoints of the server"),
        Kind(
            "dialect",
            "dovetail.contracts.dialect:Dialect",
            _V1,
            "how a family of chat models writes reasoning and tool calls",
            "dovetail.contracts.dialect:DialectNeed",
        ),
        Kind(
            "kv_connector",
            "dovetail.contracts.kv_connector:KVConnector",
            ContractVersion(1, 1),
            "where KV blocks are kept besides the device",
        ),
        Kind(
            "router",
            "dovetail.contracts.router:Router",
            ContractVersion(1, 2),
            "which replica of an engine takes a request",
        ),
        Kind("command", "dovetail.contracts.command:Command", _V1, "a command of the CLI"),
        Kind(
            "telemetry_sink",
            "dovetail.contracts.telemetry:TelemetrySink",
            ContractVersion(1, 6),
            "where measurements go",
        ),
    )
}

HOOKS_VERSION = ContractVersion(1, 0)
"""Version of `dovetail.contracts.hooks`."""

HOOKS_GROUP = f"dovetail.hooks.v{HOOKS_VERSION.major}"
"""Entry-point group of modules or objects that implement `dovetail.contracts.hooks` (pluggy)."""

DEFAULTS_GROUP = "dovetail.defaults"
"""Entry-point group of default values of the config, by dotted key: "model.path"."""

CONFIG_NAMES_GROUP = "dovetail.config_names"
"""Entry-point group of mappings from another project's names for settings to ours: name -> `ForeignName`. Messages call
the project by the entry point's name."""

NAMES_GROUP = "dovetail.names"
"""Entry-point group of packages with names of another project, such as vLLM's. An import of such a name from `dovetail`
points to the package that lists it in `__all__`."""

TEMPLATES_GROUP = "dovetail.templates"
"""Entry-point group of templates from which `dovetail plugins new --from NAME` starts, named KIND.NAME: packages whose
folders have the files."""
