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

    @property
    def group(self) -> str:
        """Entry-point group of the major version that this host speaks."""
        return f"dovetail.{self.name}.v{self.version.major}"


_V1 = ContractVersion(1, 0)
_V1_1 = ContractVersion(1, 1)
_V1_2 = ContractVersion(1, 2)
_V1_3 = ContractVersion(1, 3)
_V1_4 = ContractVersion(1, 4)
_V1_5 = ContractVersion(1, 5)
_V1_6 = ContractVersion(1, 6)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("executor", "dovetail.contracts.executor:Executor", _V1_5, "where workers run and how steps reach them"),
        Kind(
            "attention_backend",
            "dovetail.contracts.attention:AttentionBackend",
            _V1_6,
            "the KV page layout and attention over it",
        ),
        Kind("scheduler", "dovetail.contracts.scheduler:Scheduler", _V1_1, "which requests run next, who gives way"),
        Kind(
            "model_family", "dovetail.contracts.model:ModelFamily", _V1_4, "a config to a module that calls attention"
        ),
        Kind("weight_format", "dovetail.contracts.weights:WeightFormat", _V1_3, "named tensors from a path, lazily"),
        Kind("model_source", "dovetail.contracts.weights:ModelSource", _V1, "a model reference to local files"),
        Kind(
            "quantization",
            "dovetail.contracts.quantization:QuantizationMethod",
            _V1_6,
            "how a linear layer's weights are held and multiplied",
        ),
        Kind("operators", "dovetail.contracts.operators:Operators", _V1_4, "the small operators between linear layers"),
        Kind("logits_processor", "dovetail.contracts.logits:LogitsProcessor", _V1, "what may be sampled"),
        Kind("draft_worker", "dovetail.contracts.speculation:DraftWorker", _V1_3, "guessed tokens, chain or tree"),
        Kind("acceptance_rule", "dovetail.contracts.speculation:AcceptanceRule", _V1_4, "which drafts stand"),
        Kind("command", "dovetail.contracts.command:Command", _V1, "a command of the CLI"),
        Kind("telemetry_sink", "dovetail.contracts.telemetry:TelemetrySink", _V1_1, "where measurements go"),
    )
}

HOOKS_GROUP = "dovetail.hooks.v1"
"""Entry-point group of modules or objects that implement `dovetail.contracts.hooks` (pluggy)."""

NAMES_GROUP = "dovetail.names"
"""Entry-point group of packages with names of another project, such as vLLM's: `dovetail` points to them when it is
asked for a name that they list in `__all__`."""
