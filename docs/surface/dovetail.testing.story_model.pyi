from pathlib import Path

__all__ = [
    "STORY",
    "save_story_model",
]
STORY = ...
def save_story_model(directory: Path, num_layers: int = 2, vocab_size: int = 400) -> None: ...
