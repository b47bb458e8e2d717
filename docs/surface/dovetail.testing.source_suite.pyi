from collections.abc import Mapping
from dataclasses import dataclass, field
from dovetail.contracts.weights import ModelSource
from dovetail.testing.suite import PluginSuite
from pathlib import Path
from typing import Any, ClassVar

ODD_REFERENCES = ...

@dataclass(frozen=True)
class ExistingModel:
    reference: str
    options: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None


class ModelSourceSuite(PluginSuite):
    kind: ClassVar[str] = 'model_source'
    plugin: ClassVar[type[ModelSource]]
    options: ClassVar[Mapping[str, Any]] = {}
    reference: ClassVar[str | None] = None
    revision: ClassVar[str | None] = None
    missing: ClassVar[str] = 'no-such-model'
    @classmethod
    def reason_incomplete(cls) -> str | None: ...
    def existing(self, tmp_path: Path) -> ExistingModel: ...
    def source(self, existing: ExistingModel) -> ModelSource: ...
