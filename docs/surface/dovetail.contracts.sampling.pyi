from collections.abc import Mapping
from dataclasses import dataclass, field
from dovetail.contracts.structured_outputs import StructuredOutputs
from typing import Any, TypeVar

T = TypeVar('T')
def unknown_field(cls: type, name: str) -> str: ...

@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    bad_words: str | list[str] | tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    logprobs: int | None = None
    logprobs_mode: str | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    kept_special_tokens: list[int] | tuple[int, ...] = ()
    truncate_prompt_tokens: int | None = None
    output_kind: str = 'cumulative'
    speculation: str | None = None
    acceptance: str | None = None
    prediction: str | list[int] | tuple[int, ...] | None = None
    processors: Mapping[str, Any] = field(default_factory=dict)
    structured_outputs: StructuredOutputs | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    def snapshot(self) -> SamplingParams: ...
    @property
    def is_greedy(self) -> bool: ...
    @property
    def num_sequences(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

def as_token_ids(name: str, values: object) -> tuple[int, ...]: ...
