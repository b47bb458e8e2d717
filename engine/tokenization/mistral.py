"""Tokenizers of Mistral's own files (tekken.json, tokenizer.model), read by their own library mistral-common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.engine.tokenization.form import TokenizerForm
from dovetail.engine.tokenization.tokenizer import Tokenizer

_FILES = ("tekken.json", "tokenizer.model.v*", "tokenizer.model")


def load_with_mistral_common(directory: Path) -> Tokenizer:
    """The tokenizer of Mistral's files in `directory`. Raises `ModelError`."""
    found = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    if not found:
        raise ModelError(
            f"tokenizer_mode mistral needs tekken.json or tokenizer.model, and {directory} has neither: use auto"
        )
    try:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Library
    except ImportError as error:
        raise ModelError(
            f"tokenizer_mode mistral needs the package mistral-common ({error}): pip install 'dovetail[mistral]'"
        ) from error
    try:
        return MistralTokenizer(Library.from_file(str(found[0])), directory)
    except Exception as error:
        # The library fails in many ways on a file that is not right; the user needs to know which, and why.
        raise ModelError(f"mistral-common cannot read {found[0]}: {error}") from error


class MistralTokenizer(Tokenizer):
    """A tokenizer of mistral-common. What conversations look like is the library's to know, so there are no templates;
    the text of control tokens in a prompt stays text."""

    def __init__(self, library: Any, directory: Path):
        backend = library.instruct_tokenizer.tokenizer
        roles = {"bos_token": backend.bos_id, "eos_token": backend.eos_id, "unk_token": backend.unk_id}
        super().__init__({role: backend.id_to_piece(token_id) for role, token_id in roles.items()}, {})
        self._library = library
        self._directory = directory
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return int(self._backend.n_words)

    @property
    def tokenizer_json(self) -> str | None:
        """None: the library has no such form."""
        return None

    @property
    def form(self) -> TokenizerForm:
        """See `Tokenizer.form`."""
        return TokenizerForm(directory=str(self._directory), mode="mistral")

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.special_token_ids`."""
        return frozenset(token_id for token_id in range(self.vocab_size) if self._backend.is_special(token_id))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        try:
            return list(self._backend.encode(text, bos=add_special_tokens, eos=False))
        except (UnicodeError, TypeError) as error:
            raise RequestError(f"the text cannot be tokenized, it is not valid Unicode: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        policy = SpecialTokenPolicy.IGNORE if skip_special_tokens else SpecialTokenPolicy.KEEP
        return str(self._backend.decode(list(ids), special_token_policy=policy))

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._vocabulary.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer.id_to_token`."""
        return str(self._backend.id_to_piece(token_id)) if 0 <= token_id < self.vocab_size else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> Any:
        """See `Tokenizer.apply_chat_template`. The library writes the prompt: templates and their variables are
        refused, and so is a conversation that it finds wrong."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if chat_template is not None or kwargs:
            what = "chat_template" if chat_template is not None else ", ".join(kwargs)
            raise RequestError(f"{what}: tokenizer_mode mistral writes conversations without a template; use mode auto")
        if not add_generation_prompt and not continue_final_message:
            raise RequestError("tokenizer_mode mistral writes only conversations that are to be answered or continued")
        try:
            request = ChatCompletionRequest.from_openai(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                continue_final_message=continue_final_message,
            )
            encoded = self._library.encode_chat_completion(request)
        except Exception as error:
            # The library checks roles, tools and ids, each with errors of its own: any is about this conversation.
            raise RequestError(f"mistral-common refused the messages: {error}") from error
        return list(encoded.tokens) if tokenize else str(encoded.text)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, list[int]]:
        """See `Tokenizer.chat_prompt`. The text is only to be read: control tokens are not found in it again."""
        ids: list[int] = self.apply_chat_template(messages, **{**options, "tokenize": True})
        return self.decode(ids, skip_special_tokens=False), ids

    def chat_tail(self, text: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """See `Tokenizer.chat_tail`. The library ends prompts with the message that is to be answered or continued."""
        content = messages[-1].get("content") if options.get("continue_final_message") else ""
        return content if isinstance(content, str) else ""

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {self._backend.id_to_piece(token_id): token_id for token_id in reversed(range(self.vocab_size))}
