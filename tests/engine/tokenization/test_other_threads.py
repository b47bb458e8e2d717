"""Other threads run while a long text is tokenized: an API process serves streams meanwhile."""

from __future__ import annotations

import threading
import time

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.engine.tokenization.tokenizer import FastTokenizer


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    backend = Backend(BPE({char: token for token, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = FastTokenizer(backend, backend.to_str(), {}, {})
    turns, others_ran = 0, threading.Event()

    def tokenize() -> None:
        for _ in range(10):  # or else the other thread may not have been scheduled, for whatever reason
            before = turns
            tokenizer.encode("a b " * 200_000)
            if turns - before > 20:
                others_ran.set()
                return

    thread = threading.Thread(target=tokenize)
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)  # gives up the interpreter's lock, and has to get it again
        turns += 1
    assert others_ran.is_set(), "the text was tokenized under the interpreter's lock"
