import torch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.attention import AttentionBackend, AttentionCapabilities, AttentionNeed
from dovetail.contracts.plugin import Environment
from dovetail.testing.attention_cases import AttentionCase
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

__all__ = [
    "AttentionBackendSuite",
    "DEFAULT_TOLERANCES",
    "Tolerance",
]

class AttentionBackendSuite(PluginSuite):
    kind: ClassVar[str] = 'attention_backend'
    plugin: ClassVar[type[AttentionBackend]]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = 'cpu'
    tolerances: ClassVar[Mapping[str, Tolerance]] = DEFAULT_TOLERANCES
    num_cases: ClassVar[int] = 6
    latent_sizes: ClassVar[Sequence[tuple[int, int]]] = ((16, 8), (32, 8), (64, 16))
    def create(self, case: AttentionCase) -> AttentionBackend: ...
    def environment(self) -> Environment: ...
    def need(self, **changes: Any) -> AttentionNeed: ...
    @property
    def capabilities(self) -> AttentionCapabilities: ...
    @property
    def main_dtype(self) -> str: ...
    def case(
        self,
        seed: int,
        dtype: str | None = None,
        feature: str = 'plain',
        **changes: Any,
    ) -> AttentionCase: ...
    def assert_close(self, actual: torch.Tensor, case: AttentionCase) -> None: ...
    def kv_dtypes(self, feature: str) -> list[str]: ...
    def require(self, *names: str, **values: str | int) -> None: ...
    def rotate_and_run(
        self,
        case: AttentionCase,
        rotary_size: int,
    ) -> tuple[torch.Tensor, AttentionCase]: ...
    def check(self, need: AttentionNeed) -> list[str]: ...

DEFAULT_TOLERANCES: Mapping[str, Tolerance] = ...

@dataclass(frozen=True)
class Tolerance:
    absolute: float
    relative: float
    reason: str
