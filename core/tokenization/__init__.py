"""Text to tokens and back: tokenizers, chat templates, incremental detokenization, stop strings."""

from dovetail.tokenization.detokenizer import IncrementalDetokenizer
from dovetail.tokenization.load import load_tokenizer
from dovetail.tokenization.stop_strings import StopChecker
from dovetail.tokenization.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopChecker", "Tokenizer", "load_tokenizer"]
