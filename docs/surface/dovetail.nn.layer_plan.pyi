import torch
from collections.abc import Mapping, Sequence
from dovetail.contracts.layer_plan import LayerPlan
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.quantization import QuantizationMethod
from dovetail.contracts.weights import TensorInfo
from typing import Any

def plan_layers(
    family: ModelFamily,
    config: Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    kv_dtype: str = 'float32',
    max_model_len: int = 1,
    layers_held: range | None = None,
    is_first_stage: bool = True,
    is_last_stage: bool = True,
) -> LayerPlan: ...
def bytes_held(
    plan: LayerPlan,
    method: QuantizationMethod | None,
    plain: int,
    infos: Sequence[TensorInfo],
) -> dict[str, float]: ...
def second_copies(
    plan: LayerPlan,
    method: QuantizationMethod | None,
    device_type: str,
    dtype: torch.dtype,
) -> int: ...
