"""Tokens of a server's model, for prompts of a given length."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from dovetail.commands.checks import read_text, require, require_at_least
from dovetail.commands.http import error_message, without_password
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.bench.corpus import prose

SERVER = "server"
_RANDOM_CORPUS = 100_000


class Tokenizer(Protocol):
    """Text to token ids without special tokens, and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def plain_ids(self) -> Sequence[int]:
        """All ids that are no special tokens."""
        ...


class LocalTokenizer:
    """A tokenizer that transformers reads."""

    def __init__(self, path: str):
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"--tokenizer {path}: cannot be read ({reason}); give a folder with a tokenizer, or"
                f" `--tokenizer {SERVER}` where the server has /tokenize"
            ) from None
        # Its warning about texts longer than the model is not about what is cut from them.
        logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(list(ids)))

    def plain_ids(self) -> Sequence[int]:
        """All ids but the special ones."""
        special = set(self._tokenizer.all_special_ids)
        return [token for token in range(len(self._tokenizer)) if token not in special]


class ServerTokenizer:
    """The server's own, by POST /tokenize and /detokenize as vLLM has them."""

    def __init__(self, client: httpx.Client, base_url: str, model: str):
        self._client, self._base_url, self._model = client, base_url, model

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._post("/tokenize", body, "tokens")]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._post("/detokenize", {"model": self._model, "tokens": list(ids)}, "prompt"))

    def plain_ids(self) -> Sequence[int]:
        """Refused: the server does not say."""
        raise ConfigError("random token ids need the vocabulary, which no server tells: give --vocab-size N")

    def _post(self, path: str, body: dict[str, Any], field: str) -> Any:
        url = self._base_url + path
        try:
            answer = self._client.post(url, json=body)
            if answer.status_code == 200:
                return answer.json()[field]
            reason = f"status {answer.status_code}: {error_message(answer.content)}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise DovetailError(
            f"--tokenizer {SERVER}: {without_password(url)} gives no {field} ({reason}); give --tokenizer PATH"
        )


@contextmanager
def open_tokenizer(
    name: str | None, base_url: str, model: str, headers: Mapping[str, str]
) -> Iterator[Tokenizer | None]:
    """The tokenizer that an option names: a path, or "server"; None for None."""
    if name != SERVER:
        yield None if name is None else LocalTokenizer(name)
        return
    with httpx.Client(headers=headers, timeout=60.0, trust_env=False) as client:
        yield ServerTokenizer(client, base_url, model)


def needed(tokenizer: Tokenizer | None, why: str) -> Tokenizer:
    """The tokenizer. Raises `ConfigError` where there is none."""
    if tokenizer is None:
        raise ConfigError(
            f"{why} needs the model's tokenizer: give --tokenizer PATH, or `--tokenizer {SERVER}` where the server has"
            " /tokenize"
        )
    return tokenizer


def plain_ids(tokenizer: Tokenizer | None, vocab_size: int | None) -> Sequence[int]:
    """Ids to draw from: 0 to vocab_size - 1, or the tokenizer's without special tokens. Raises `ConfigError`."""
    if vocab_size is not None:
        require_at_least("--vocab-size", vocab_size, 2)
        return range(vocab_size)
    require(tokenizer is not None, "random token ids need a vocabulary: give --tokenizer PATH or --vocab-size N")
    return needed(tokenizer, "a random prompt").plain_ids()


def corpus_of(path: Path | None, tokenizer: Tokenizer | None, vocab_size: int | None, seed: int) -> list[int]:
    """Tokens to cut prompts from: of a text file, or of the bundled story; random ids where only --vocab-size is given.
    Raises `ConfigError`."""
    if tokenizer is None and vocab_size is not None and path is None:
        draw = random.Random(seed)
        return draw.choices(plain_ids(None, vocab_size), k=_RANDOM_CORPUS)
    text = prose() if path is None else read_text("--text", path)
    return needed(tokenizer, "a prompt of a given length").encode(text)
