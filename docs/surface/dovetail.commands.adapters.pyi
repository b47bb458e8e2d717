from collections.abc import Sequence
from dovetail.config.layers import LayeredConfig
from dovetail.contracts.lora import LoRARequest

__all__ = [
    "LORA_HELP",
    "with_adapter",
]
LORA_HELP = "Adapter (LoRA) for all prompts: NAME=PATH or PATH, a folder of PEFT's, or the name of one in lora.modules."
def with_adapter(
    layered: LayeredConfig,
    given: Sequence[str],
) -> tuple[LayeredConfig, LoRARequest | None]: ...
