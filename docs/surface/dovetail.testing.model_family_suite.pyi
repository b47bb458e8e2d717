import pytest, torch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.model import ModelFamily, ModelSize
from dovetail.nn import AdapterSpace, LowRank
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.suite import PluginSuite
from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "FamilyCheckpoint",
    "ModelFamilySuite",
]

@dataclass(frozen=True)
class FamilyCheckpoint:
    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    num_parameters: int
    compute: Callable[[Sequence[int]], tuple[torch.Tensor, Sequence[torch.Tensor]]]


class ModelFamilySuite(PluginSuite):
    kind: ClassVar[str] = 'model_family'
    plugin: ClassVar[type[ModelFamily]]
    options: ClassVar[Mapping[str, Any]] = {}
    model_type: ClassVar[str | None] = None
    overrides: ClassVar[Mapping[str, Any]] = {}
    max_model_len: ClassVar[int] = 256
    tolerance: ClassVar[float] = 2e-05
    needs_operators: ClassVar[bool] = True
    unadapted: ClassVar[Sequence[str]] = ('.*experts?\\..*', '.*(router|\\.gate)\\..*')
    def create_checkpoint(self, directory: Path, is_tied: bool) -> FamilyCheckpoint: ...
    @classmethod
    def checkpoint(
        cls,
        request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> FamilyCheckpoint: ...
    def family(self) -> ModelFamily: ...
    def check(self, config: Mapping[str, Any], tensor_parallel: int = 1) -> list[str]: ...
    def harness(self, checkpoint: FamilyCheckpoint, **settings: Any) -> ModelHarness: ...
    def prompt(
        self,
        checkpoint: FamilyCheckpoint,
        num_tokens: int = 30,
        seed: int = 1,
    ) -> list[int]: ...
    def size(self, checkpoint: FamilyCheckpoint) -> ModelSize: ...
    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None: ...
    def embeddings(self, checkpoint: FamilyCheckpoint, token_ids: Sequence[int]) -> torch.Tensor: ...
    def space(self) -> AdapterSpace: ...
    def adapted(self, checkpoint: FamilyCheckpoint) -> dict[str, tuple[int, ...]]: ...
    def hidden_states(
        self,
        harness: ModelHarness,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        adapters: Sequence[Mapping[str, LowRank]],
    ) -> torch.Tensor: ...
