"""Text to token ids and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tokenizers

from dovetail.contracts.errors import RequestError
from dovetail.tokenization.pieces import PieceTable, create_table, decode_utf8

if TYPE_CHECKING:
    from dovetail.tokenization.chat import ChatTemplate


class Tokenizer(ABC):
    """One model's tokenizer. Made by `load_tokenizer`."""

    def __init__(self, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]):
        self.special_tokens = dict(special_tokens)
        """Role -> text: "bos_token", "eos_token", ...; those that the checkpoint names."""
        self.chat_templates = dict(chat_templates)
        """Name -> Jinja source; "default", and others where the checkpoint has more than one."""
        self._compiled: dict[str, ChatTemplate] = {}

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model may have more rows than that."""

    @property
    @abstractmethod
    def tokenizer_json(self) -> str | None:
        """The tokenizer as JSON of the `tokenizers` library, as the checkpoint has it; None where there is none."""

    @property
    @abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text, such as BOS.

        Raises `RequestError` for text that is no Unicode (lone surrogates).
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; what is not UTF-8 becomes U+FFFD."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token's text in the vocabulary, None if there is none."""

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """A token's text in the vocabulary ("Ġworld"), None if there is none."""

    @property
    def bos_token_id(self) -> int | None:
        """The token before a text, None if there is none."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, None if there is none. The model's generation defaults may name more."""
        return self._special_id("eos_token")

    def piece_table(self, skip_special_tokens: bool) -> PieceTable | None:
        """Bytes per token, None where tokens do not decode one by one."""
        return None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it with add_special_tokens=False.

        `chat_template` is Jinja source or the name of one of the checkpoint's templates; None takes "tool_use" where
        there are tools and such a template, else "default". `kwargs` are variables for the template. Raises
        `RequestError` where there is no template or it refuses the messages.
        """
        source = self._template_source(chat_template, bool(tools))
        if source not in self._compiled:
            # Jinja takes a moment to import, and not every engine chats.
            from dovetail.tokenization.chat import ChatTemplate

            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source].render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={"tools": tools, **self.special_tokens, **kwargs},
        )

    def _template_source(self, chat_template: str | None, has_tools: bool) -> str:
        if chat_template is not None:
            return self.chat_templates.get(chat_template, chat_template)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            names = ", ".join(sorted(self.chat_templates))
            raise RequestError(
                f"the model has several chat templates and no default: give chat_template one of {names}"
            )
        raise RequestError("the model has no chat template: give chat_template, or send a prompt instead of messages")

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.token_to_id(token)


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        json: str,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        first_token: int | None = None,
    ):
        """`first_token` is put in front by `encode`; None: the backend adds by itself what is to be added."""
        super().__init__(special_tokens, chat_templates)
        # A saved tokenizer may cut or fill up its input, as its training needed.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._json = json
        self._prefix = [] if first_token is None else [first_token]
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tables = {skips: self._create_table(skips) for skips in (False, True)}

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def tokenizer_json(self) -> str | None:
        """See `Tokenizer.tokenizer_json`."""
        return self._json

    @property
    def special_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.special_token_ids`."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text cannot be tokenized, it is not valid Unicode: {error}") from error
        return self._prefix + ids if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        table = self._tables[skip_special_tokens]
        if table is None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        text, _ = decode_utf8(table.join(ids), final=True)
        return text.removeprefix(" ") if table.strips_space else text

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer.id_to_token`."""
        return self._backend.id_to_token(token_id)

    def piece_table(self, skip_special_tokens: bool) -> PieceTable | None:
        """See `Tokenizer.piece_table`."""
        return self._tables[skip_special_tokens]

    def _create_table(self, skips_special: bool) -> PieceTable | None:
        decoder = self._backend.decoder
        if decoder is None:
            return None
        skipped = self._special_ids if skips_special else frozenset()
        return create_table(decoder.__getstate__().decode(), self._backend.id_to_token, skipped)
