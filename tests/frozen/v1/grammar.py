"""One of the strings of a JSON array, spelled in any way."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarCapabilities, GrammarSetup, Matcher
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.contracts.plugin import PluginOptions


class Options(PluginOptions):
    most: int = 1000


class Frozen(Grammar):
    contract = (1, 0)
    Options = Options
    capabilities = GrammarCapabilities(forms=frozenset({"choice"}), forced=True)
    preference = -100

    def __init__(self, options: Options, setup: GrammarSetup):
        super().__init__(options, setup)
        self.token_bytes = token_bytes(setup)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.form != "choice":
            raise RequestError(f"choices only, not {spec.form}")
        if len(spec.source.encode()) > self.setup.limits.source_bytes:
            raise RequestError("too long")
        try:
            choices = json.loads(spec.source)
        except ValueError as error:
            raise RequestError(f"no JSON: {error}") from None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise RequestError("no array of strings")
        if len(choices) > self.options.most:
            raise RequestError(f"more than {self.options.most} choices")
        return Compiled(self.setup, self.token_bytes, [choice.encode() for choice in choices])


class Compiled(CompiledGrammar):
    def __init__(self, setup: GrammarSetup, token_bytes: list[bytes], choices: list[bytes]):
        self.setup = setup
        self.token_bytes = token_bytes
        self.choices = choices

    def start(self) -> Matcher:
        return Choosing(self)


class Choosing(Matcher):
    def __init__(self, compiled: Compiled):
        self.setup = compiled.setup
        self.token_bytes = compiled.token_bytes
        self.choices = compiled.choices
        self.taken: list[int] = []

    @property
    def text(self) -> bytes:
        return b"".join(self.token_bytes[token] for token in self.taken if token not in self.setup.eos_token_ids)

    @property
    def rest(self) -> list[bytes]:
        text = self.text
        return [choice[len(text) :] for choice in self.choices if choice.startswith(text)]

    def is_legal(self, token: int) -> bool:
        if token in self.setup.eos_token_ids:
            return self.may_end
        if self.has_ended or not 0 <= token < self.setup.vocab_size or not self.token_bytes[token]:
            return False
        return any(rest.startswith(self.token_bytes[token]) for rest in self.rest)

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        flags = np.zeros(len(row) * 32, np.uint8)
        flags[[token for token in range(self.setup.vocab_size) if self.is_legal(token)]] = 1
        row[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def advance(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not self.is_legal(int(token)):
                return count
            self.taken.append(int(token))
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self.taken):
            raise ValueError(f"{num_tokens} of {len(self.taken)}")
        del self.taken[len(self.taken) - num_tokens :]

    def legal_prefix(self, token_ids: Sequence[int]) -> int:
        count = self.advance(token_ids)
        self.rollback(count)
        return count

    def forced(self) -> tuple[int, ...]:
        rest, common = self.rest, b""
        while not self.has_ended and common not in rest and len({one[: len(common) + 1] for one in rest}) == 1:
            common = rest[0][: len(common) + 1]
        return tuple(self.token_bytes.index(common[at : at + 1]) for at in range(len(common)))

    @property
    def has_ended(self) -> bool:
        return bool(self.taken) and self.taken[-1] in self.setup.eos_token_ids

    @property
    def may_end(self) -> bool:
        return b"" in self.rest

    @property
    def is_done(self) -> bool:
        return self.has_ended or set(self.rest) == {b""}


def token_bytes(setup: GrammarSetup) -> list[bytes]:
    tokenizer = Tokenizer.from_str(setup.tokenizer_json)
    silent = {token["id"] for token in json.loads(setup.tokenizer_json)["added_tokens"]} | set(setup.eos_token_ids)
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    byte_of = {chr(byte) if byte in printed else chr(next(others)): byte for byte in range(256)}
    assert set(byte_of) == set(pre_tokenizers.ByteLevel.alphabet())
    found = [b""] * max(setup.vocab_size, tokenizer.get_vocab_size())
    for token, token_id in tokenizer.get_vocab().items():
        if token_id not in silent:
            found[token_id] = bytes(byte_of[letter] for letter in token)
    return found
