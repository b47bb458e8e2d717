"""Text to tokens and back: tokenizers, chat templates, incremental detokenization, stop strings."""

from dovetail.engine.tokenization.detokenizer import Detokenizer, create_detokenizer
from dovetail.engine.tokenization.form import TokenizerForm
from dovetail.engine.tokenization.load import load_tokenizer, load_tokenizer_of, tokenizer_from_form
from dovetail.engine.tokenization.stop_strings import StopChecker
from dovetail.engine.tokenization.tokenizer import FastTokenizer, Tokenizer

__all__ = [
    "Detokenizer",
    "FastTokenizer",
    "StopChecker",
    "Tokenizer",
    "TokenizerForm",
    "create_detokenizer",
    "load_tokenizer",
    "load_tokenizer_of",
    "tokenizer_from_form",
]
