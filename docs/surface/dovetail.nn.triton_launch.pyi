from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

FP_FUSION: Mapping[str, Any] = MappingProxyType({'enable_fp_fusion': True})

@dataclass(frozen=True)
class Launch:
    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
