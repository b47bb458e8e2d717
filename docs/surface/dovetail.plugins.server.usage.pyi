from collections.abc import Iterable
from dovetail.contracts.outputs import RequestMetrics, RequestOutput
from typing import Any

def usage(
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_cached_tokens: int,
) -> dict[str, Any]: ...
def with_prediction(counts: dict[str, Any], metrics: RequestMetrics) -> dict[str, Any]: ...
def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]: ...
