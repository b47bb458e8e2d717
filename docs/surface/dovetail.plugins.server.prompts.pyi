from collections.abc import Sequence

Prompts = str | list[str | int | list[int]]
def separate_prompts(given: Prompts, field: str) -> Sequence[str | list[int]]: ...
