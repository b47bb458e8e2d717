from pathlib import Path
from typing import Any

__all__ = [
    "save_tiny_encoder",
    "save_word_pieces",
    "tiny_encoder",
]
def save_tiny_encoder(
    directory: Path,
    model_type: str = 'bert',
    seed: int = 0,
    num_labels: int = 0,
    **overrides: Any,
) -> Any: ...
def save_word_pieces(directory: Path) -> None: ...
def tiny_encoder(
    model_type: str = 'bert',
    seed: int = 0,
    num_labels: int = 0,
    **overrides: Any,
) -> Any: ...
