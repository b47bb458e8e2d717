"""A tokenizer as plain data, for another process to build the same one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TokenizerForm:
    """Where a tokenizer comes from: JSON of the library `tokenizers`, or files."""

    json: str | None = None
    """As `tokenizers.Tokenizer.to_str` writes it; None: `directory` has the files."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    first_token: int | None = None
    """See `FastTokenizer`."""
    directory: str = ""
    mode: str = "auto"
    """`tokenizer_mode` that read `directory`."""

    @property
    def path(self) -> Path:
        """`directory` as a path."""
        return Path(self.directory)
