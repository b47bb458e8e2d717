from collections.abc import Iterable
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.engine import LLMEngine

def stream(
    engine: LLMEngine,
    prompt: Prompt,
    params: SamplingParams,
    *,
    lora_request: LoRARequest | None = None,
) -> RequestOutput | None: ...
def print_rates(output: RequestOutput) -> None: ...
def print_speculation(outputs: Iterable[RequestOutput]) -> None: ...
