"""Texts that are cut to a number of tokens: as the `tokenizers` library cuts with `enable_truncation`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from dovetail.contracts.errors import RequestError
from dovetail.engine.pooling.scores import pair_prompt
from dovetail.engine.tokenization.cutting import encode_pair_start, encode_start
from dovetail.engine.tokenization.tokenizer import FastTokenizer
from dovetail.testing.tiny_encoders import save_word_pieces

TEXTS = ["a", "the cat sat on the mat.", "what is a dog? the dog is a dog", "cat " * 12]
ROBERTA = TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
Load = Callable[[], tokenizers.Tokenizer]


@pytest.fixture(scope="module", params=["bert", "roberta"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    directory: Path = tmp_path_factory.mktemp("word-pieces")
    save_word_pieces(directory)

    def loaded() -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_padding()
        if request.param == "roberta":
            tokenizer.post_processor = ROBERTA
        return tokenizer

    return loaded


def fast(load: Load) -> FastTokenizer:
    return FastTokenizer(load(), "", {}, {})


@pytest.mark.parametrize("most", range(3, 20))
def test_special_tokens_stay_around_the_beginning_of_a_text(load: Load, most: int) -> None:
    oracle, tokenizer = load(), fast(load)
    oracle.enable_truncation(most)
    assert [encode_start(tokenizer, text, most) for text in TEXTS] == [oracle.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("most", range(6, 30))
def test_of_a_pair_the_longer_text_is_cut_first(load: Load, most: int) -> None:
    oracle, tokenizer = load(), fast(load)
    oracle.enable_truncation(most, strategy="longest_first")
    for first in TEXTS:
        for second in TEXTS:
            expected = oracle.encode(first, second)
            assert encode_pair_start(tokenizer, first, second, most) == (expected.ids, expected.type_ids)


def test_token_ids_of_a_pair_are_cut_alike() -> None:
    pair = pair_prompt(None, [1, 2, 3, 4, 5], [6, 7], has_types=False, most=5)
    assert pair == {"prompt_token_ids": [1, 2, 3, 6, 7]}


def test_less_than_the_special_tokens_is_refused(load: Load) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens 2 leaves no tokens for the text"):
        encode_start(fast(load), TEXTS[1], 2)
    with pytest.raises(RequestError, match="truncate_prompt_tokens 4 leaves no tokens"):
        encode_pair_start(fast(load), TEXTS[1], TEXTS[2], 4)
