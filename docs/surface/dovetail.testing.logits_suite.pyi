from collections.abc import Mapping, Sequence
from dovetail.contracts.logits import LogitsProcessor, LogitsSetup
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

Row = tuple[int, list[int]]

class LogitsProcessorSuite(PluginSuite):
    kind: ClassVar[str] = 'logits_processor'
    plugin: ClassVar[type[LogitsProcessor]]
    options: ClassVar[Mapping[str, Any]] = {}
    request_options: ClassVar[Sequence[Any]] = (None,)
    refused_options: ClassVar[Sequence[Any]] = ()
    setup: ClassVar[LogitsSetup] = LogitsSetup(vocab_size=64, eos_token_ids=(1, 2), tokenizer_json=None)
    def processor(self) -> LogitsProcessor: ...
    def create(self) -> LogitsProcessor: ...
    def text(self, seq_id: int, num_tokens: int) -> list[int]: ...
