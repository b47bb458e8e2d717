from pathlib import Path
from typing import Any

__all__ = [
    "save_tiny_encoder",
    "tiny_encoder",
]
def save_tiny_encoder(
    directory: Path,
    model_type: str = 'bert',
    seed: int = 0,
    **overrides: Any,
) -> Any: ...
def tiny_encoder(model_type: str = 'bert', seed: int = 0, **overrides: Any) -> Any: ...
