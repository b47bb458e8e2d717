from dovetail.contracts.sampling import SamplingParams
from typing import Any

def sampling_params(
    defaults: SamplingParams,
    settings: list[str],
    *,
    default_max_tokens: int,
    **flags: Any,
) -> SamplingParams: ...
def refuse_unseen(params: SamplingParams) -> None: ...
