from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "Prompt",
    "Shape",
    "parse_prompts",
    "read_prompts",
]

@dataclass(frozen=True, kw_only=True)
class Prompt:
    index: int
    origin: str
    category: str = 'all'
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    output_tokens: int | None = None
    later_turns: tuple[str, ...] = ()
    sub_category: str | None = None
    prediction: str | tuple[int, ...] | None = None

Shape = Literal['prompts', 'spec_bench', 'humaneval', 'gsm8k']
def parse_prompts(
    text: str,
    origin: str,
    shape: Shape | Literal['auto'] = 'auto',
) -> tuple[Shape, list[Prompt]]: ...
def read_prompts(
    option: str,
    path: Path,
    shape: Shape | Literal['auto'] = 'auto',
) -> tuple[Shape, list[Prompt]]: ...
