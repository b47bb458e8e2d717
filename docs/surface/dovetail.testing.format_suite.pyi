import torch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from dovetail.contracts.weights import ModelFiles, WeightFormat, WeightReader
from dovetail.testing.suite import PluginSuite
from pathlib import Path
from typing import Any, ClassVar

FOREIGN = ...
CUTS = {'empty': 0.0, 'one byte': 1e-09, 'a tenth': 0.1, 'half': 0.5, 'all but one byte': 1.0}

@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tolerance: Mapping[str, float] = field(default_factory=dict)
    @property
    def files(self) -> ModelFiles: ...


class WeightFormatSuite(PluginSuite):
    kind: ClassVar[str] = 'weight_format'
    plugin: ClassVar[type[WeightFormat]]
    options: ClassVar[Mapping[str, Any]] = {}
    def saved(self, tmp_path: Path) -> SavedCheckpoint: ...
    def format(self) -> WeightFormat: ...
    def reader(self, format: WeightFormat, saved: SavedCheckpoint) -> Iterator[WeightReader]: ...
