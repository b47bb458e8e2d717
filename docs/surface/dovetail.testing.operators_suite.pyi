import pytest, torch
from collections.abc import Mapping
from dovetail.contracts.operators import AcceptsChains, DrawsTokens, MultipliesGroups, Operators
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

__all__ = [
    "OperatorsSuite",
]

class OperatorsSuite(PluginSuite):
    kind: ClassVar[str] = 'operators'
    plugin: ClassVar[type[Operators]]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = 'cpu'
    ulps: ClassVar[float] = 8
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype: ...
    def operators(self, dtype: torch.dtype) -> Operators: ...
    def check(self, dtype: str, device_type: str | None = None) -> list[str]: ...
    def random(self, *shape: int, dtype: torch.dtype, scale: float = 2.0) -> torch.Tensor: ...
    def assert_close(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        roundings: int,
        scale: Any = 0.0,
    ) -> None: ...
    def extra(self, kind: type[Extra]) -> Extra: ...
    def chain_operators(self) -> AcceptsChains: ...
    def drawing_operators(self) -> DrawsTokens: ...
    def grouping_operators(self) -> MultipliesGroups: ...
