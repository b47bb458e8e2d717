"""What a request may have made of its prompt's hidden states, and the result, in plain data. The plugins that make it
are in `dovetail.contracts.pooling`."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Final

from dovetail.contracts.errors import RequestError

EMBED: Final = "embed"
"""One vector for the prompt."""
TOKEN_EMBED: Final = "token_embed"
"""One vector for each token of the prompt."""
CLASSIFY: Final = "classify"
"""One score per label for the prompt."""
TOKEN_CLASSIFY: Final = "token_classify"
"""One score per label for each token of the prompt: rewards of a process reward model, say."""

TASKS: Final = (EMBED, TOKEN_EMBED, CLASSIFY, TOKEN_CLASSIFY)
"""What a request may ask for. The names are vLLM's; each is a key of the config's section `pooling`."""
LABEL_TASKS: Final = frozenset({CLASSIFY, TOKEN_CLASSIFY})
"""Those that need a score head: a linear layer of the checkpoint from a hidden state to its labels."""


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What is made of the prompt of one request. Field names are vLLM's.

    Raises `RequestError`, naming the field, for a value that nothing can serve. What the model cannot serve is refused
    when the request is added.
    """

    task: str | None = None
    """One of `TASKS`. None: the task of the call (`LLM.embed` sets "embed"), and otherwise "embed"."""
    dimensions: int | None = None
    """Leading dimensions of an embedding that are kept, for models that were trained for it (Matryoshka embeddings,
    Kusupati et al. 2022); 1 to the hidden size. None: all."""
    normalize: bool | None = None
    """Whether an embedding is divided by its length, after `dimensions`. None: as `pooling.normalize` of the config,
    which by default is what the checkpoint's files say, else yes."""
    use_activation: bool | None = None
    """Whether scores go through the activation: the softmax over several labels, the sigmoid of one. None: yes."""
    truncate_prompt_tokens: int | None = None
    """Keeps only this many tokens at the beginning of the prompt. Of a text that includes the special tokens around it,
    which stay; of a pair of texts the longer one is cut first."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task must be None or one of {', '.join(TASKS)}, got {self.task!r}")
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise RequestError(f"{name} must be None, True or False, got {getattr(self, name)!r}")
        for name in ("dimensions", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RequestError(f"{name} must be None or an integer of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledStates:
    """The result of one request as plain data, which travels between processes without torch."""

    shape: tuple[int, ...]
    """(n,): one vector; (tokens, n): one for each token of the prompt."""
    data: bytes
    """float32, little-endian, row by row."""

    def floats(self) -> list[float]:
        """Returns the numbers, row by row."""
        values = array("f")
        values.frombytes(self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()
