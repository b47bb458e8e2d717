import torch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dovetail.contracts.weights import ModelFiles, WeightFormat, WeightReader
from dovetail.testing.suite import PluginSuite
from pathlib import Path
from typing import Any, ClassVar

FOREIGN = ...
CUTS = {'empty': 0.0, 'one byte': 1e-09, 'a tenth': 0.1, 'half': 0.5, 'all but one byte': 1.0}
Save = Callable[[Path, Mapping[str, Any], Mapping[str, torch.Tensor]], Path]

@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tolerance: Mapping[str, float] = field(default_factory=dict)
    is_known: bool = True
    @property
    def files(self) -> ModelFiles: ...


class WeightFormatSuite(PluginSuite):
    kind: ClassVar[str] = 'weight_format'
    plugin: ClassVar[type[WeightFormat]]
    function_attributes: ClassVar[frozenset[str]] = frozenset({'save'})
    options: ClassVar[Mapping[str, Any]] = {}
    save: ClassVar[Save | None] = None
    checkpoint: ClassVar[str | Path | None] = None
    expected: ClassVar[str | Path | None] = None
    tolerance: ClassVar[float] = 0.0
    @classmethod
    def reason_incomplete(cls) -> str | None: ...
    def saved(self, tmp_path: Path) -> SavedCheckpoint: ...
    def format(self) -> WeightFormat: ...
    def reader(self, format: WeightFormat, saved: SavedCheckpoint) -> Iterator[WeightReader]: ...
