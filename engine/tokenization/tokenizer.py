"""Text to token ids and back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import tokenizers

from dovetail.contracts.errors import RequestError
from dovetail.engine.tokenization.fewest import FewestTokens, fewest_tokens
from dovetail.engine.tokenization.form import TokenizerForm
from dovetail.engine.tokenization.pieces import Pieces, decode_utf8, find_pieces

if TYPE_CHECKING:
    from dovetail.engine.tokenization.chat import ChatTemplate


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
        """The tokenizer as JSON of the `tokenizers` library, with the marks that tokenizer_config.json adds; None where
        there is none."""

    @property
    @abstractmethod
    def form(self) -> TokenizerForm:
        """The tokenizer as plain data, for another process."""

    @property
    @abstractmethod
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out."""

    @property
    def added_token_ids(self) -> frozenset[int]:
        """Tokens that stand for one text and are part of no other: the special ones, and such as decoding shows."""
        return self.special_token_ids

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text, such as BOS.

        Raises `RequestError` for text that is no Unicode (lone surrogates).
        """

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Token ids of two texts as one prompt, as cross-encoders read them, and the type of each token: joined and
        typed as the tokenizer's own files say ([CLS] first [SEP] second [SEP] of BERT: 0 up to the first [SEP], then
        1), or one behind the other and 0. Raises as `encode` does."""
        ids = self.encode(first) + self.encode(second, add_special_tokens=False)
        return ids, [0] * len(ids)

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

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up, for programs that batch by themselves; None if the checkpoint names none."""
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """The token for what no other token can say, None if there is none."""
        return self._special_id("unk_token")

    @property
    def bos_token(self) -> str | None:
        """Text of `bos_token_id`."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of `eos_token_id`."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of `pad_token_id`."""
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """Text of `unk_token_id`."""
        return self.special_tokens.get("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        """`special_token_ids`, in order."""
        return sorted(self.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of `all_special_ids`."""
        return [text for token_id in self.all_special_ids if (text := self.id_to_token(token_id)) is not None]

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, None if there is none."""
        return self.chat_templates.get("default")

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Keys "input_ids" and "attention_mask": lists of integers, or lists of such lists for several texts. Nothing
        is cut or filled up."""
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(item, add_special_tokens) for item in texts]
        masks = [[1] * len(item) for item in ids]
        if isinstance(text, str):
            return {"input_ids": ids[0], "attention_mask": masks[0]}
        return {"input_ids": ids, "attention_mask": masks}

    def batch_decode(self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """`id_to_token` of one or of each."""
        return self.id_to_token(ids) if isinstance(ids, int) else [self.id_to_token(item) for item in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """`token_to_id` of one or of each; `unk_token_id` for those that are not in the vocabulary."""
        if isinstance(tokens, str):
            found = self.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [cast("int | None", self.convert_tokens_to_ids(token)) for token in tokens]

    def pieces(self, skipped: frozenset[int]) -> Pieces | None:
        """Bytes per token, none for tokens in `skipped`; None where tokens do not decode one by one."""
        return None

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens does `encode` give for `text`. Takes no time: 0 where nothing is known."""
        return 0

    def token_text(self, token_id: int) -> str:
        """The text of one token, special ones included; bytes that are no UTF-8 become U+FFFD."""
        pieces = self.pieces(frozenset())
        if pieces is None:
            return self.decode([token_id], skip_special_tokens=False)
        return pieces.of(token_id).decode("utf-8", errors="replace")

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
        """The prompt of a conversation: its text, to be encoded with add_special_tokens=False, or its token ids
        (list[int]) with `tokenize`.

        `chat_template` is Jinja source or the name of one of the checkpoint's templates; None takes "tool_use" where
        there are tools and such a template, else "default". `kwargs` are variables for the template. Raises
        `RequestError` where there is no template, it refuses the messages, or it does not read a variable or the tools.
        """
        source = self._template_source(chat_template, bool(tools))
        if source not in self._compiled:
            # Jinja takes a moment to import, and not every engine chats.
            from dovetail.engine.tokenization.chat import ChatTemplate

            self._compiled[source] = ChatTemplate(source)
        template = self._compiled[source]
        _check_variables(kwargs, template.names)
        if tools and "tools" not in template.names:
            raise RequestError(
                "tools would not reach the model, for the chat template does not read them: leave them out, or give a "
                "chat_template that does, with the request or as model.chat_template"
            )
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={"tools": tools, **self.special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, list[int]]:
        """Text and token ids of a conversation's prompt; `options` are those of `apply_chat_template`."""
        text: str = self.apply_chat_template(messages, **{**options, "tokenize": False})
        # The template writes the special tokens itself.
        return text, self.encode(text, add_special_tokens=False)

    def chat_tail(self, text: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """What of a conversation's prompt `text` is behind the last whole message; `options` are those that it was
        rendered with."""
        continues = options.get("continue_final_message", False)
        if not continues and not options.get("add_generation_prompt", True):
            return ""
        whole = messages[:-1] if continues else messages
        without = {"add_generation_prompt": False, "continue_final_message": False, "tokenize": False}
        try:
            before: str = self.apply_chat_template(whole, **{**options, **without}) if whole else ""
        except RequestError:  # a template may refuse a conversation that ends so
            content = messages[-1].get("content")
            return text.rpartition(content)[2] if isinstance(content, str) and content and not continues else text
        return text[_num_common(text, before) :]

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


def _num_common(text: str, other: str) -> int:
    """Characters with which both begin."""
    if text.startswith(other):
        return len(other)
    pairs = enumerate(zip(text, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(text), len(other)))


_OF_TRANSFORMERS = (
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
)


def _check_variables(given: Mapping[str, Any], names: frozenset[str]) -> None:
    """Refuses what no template reads, so that a misspelt word does not vanish."""
    for name, value in given.items():
        if name in names:
            continue
        if name not in _OF_TRANSFORMERS:
            raise RequestError(
                f"the chat template reads no variable {name!r}: leave it out, or give a chat_template that does"
            )
        if value not in (None, False):
            raise RequestError(
                f"apply_chat_template({name}={value!r}): a prompt is text, or a plain list of token ids with"
                " tokenize=True; cut, fill up or convert that"
            )


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
        self._added_ids = frozenset(added)
        self._pieces: dict[frozenset[int], Pieces | None] = {}
        """By the tokens that are skipped."""

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def tokenizer_json(self) -> str | None:
        """See `Tokenizer.tokenizer_json`."""
        return self._json

    @property
    def form(self) -> TokenizerForm:
        """See `Tokenizer.form`."""
        return TokenizerForm(
            json=self._backend.to_str(),
            special_tokens=self.special_tokens,
            chat_templates=self.chat_templates,
            first_token=self._prefix[0] if self._prefix else None,
        )

    @property
    def special_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.special_token_ids`."""
        return self._special_ids

    @property
    def added_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.added_token_ids`."""
        return self._added_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        try:
            # Of its methods, those of a batch let other threads run meanwhile; the fast one leaves out offsets.
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text cannot be tokenized, it is not valid Unicode: {error}") from error
        return self._prefix + ids if add_special_tokens else ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """See `Tokenizer.encode_pair`."""
        try:
            (found,) = self._backend.encode_batch_fast([(first, second)])
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the texts cannot be tokenized, they are not valid Unicode: {error}") from error
        return self._prefix + found.ids, [0] * len(self._prefix) + found.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        pieces = self.pieces(self._special_ids if skip_special_tokens else frozenset())
        if pieces is None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        text, _ = decode_utf8(b"".join(map(pieces.of, ids)), final=True)
        return text.removeprefix(" ") if pieces.strips_space else text

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer.id_to_token`."""
        return self._backend.id_to_token(token_id)

    def pieces(self, skipped: frozenset[int]) -> Pieces | None:
        """See `Tokenizer.pieces`."""
        if skipped not in self._pieces:
            self._pieces[skipped] = self._find_pieces(skipped)
        return self._pieces[skipped]

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer.fewest_tokens`."""
        return 0 if self._fewest is None else self._fewest.of(text)

    @functools.cached_property
    def _fewest(self) -> FewestTokens | None:
        return fewest_tokens(self._json)

    def _find_pieces(self, skipped: frozenset[int]) -> Pieces | None:
        decoder = self._backend.decoder
        if decoder is None:
            return None
        return find_pieces(decoder.__getstate__().decode(), self._backend.id_to_token, skipped)
