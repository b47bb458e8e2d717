"""A tokenizer that travels to another process is the same there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.form import TokenizerForm
from dovetail.engine.tokenization.load import load_tokenizer, tokenizer_from_form


def test_text_ids_and_templates_are_equal(story_model: Path) -> None:
    tokenizer = load_tokenizer(TokenizerFiles(directory=story_model), "auto")
    assert tokenizer is not None
    form = msgspec.msgpack.decode(msgspec.msgpack.encode(tokenizer.form), type=TokenizerForm)
    twin = tokenizer_from_form(form)
    text = "Once upon a time, ünïcödé \n\n <s> </s> end"
    ids = tokenizer.encode(text)
    assert twin.encode(text) == ids
    for skips in (True, False):
        assert twin.decode(ids, skips) == tokenizer.decode(ids, skips)
    assert twin.special_token_ids == tokenizer.special_token_ids
    assert twin.special_tokens == tokenizer.special_tokens
    assert twin.chat_templates == tokenizer.chat_templates
