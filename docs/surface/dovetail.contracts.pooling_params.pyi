from dataclasses import dataclass
from typing import Final

EMBED: Final = 'embed'
TOKEN_EMBED: Final = 'token_embed'
CLASSIFY: Final = 'classify'
TOKEN_CLASSIFY: Final = 'token_classify'
TASKS: Final = (EMBED, TOKEN_EMBED, CLASSIFY, TOKEN_CLASSIFY)
LABEL_TASKS: Final = frozenset({CLASSIFY, TOKEN_CLASSIFY})

@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    task: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledStates:
    shape: tuple[int, ...]
    data: bytes
    def floats(self) -> list[float]: ...
