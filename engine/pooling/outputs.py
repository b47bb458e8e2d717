"""What a request with `PoolingParams` brings back. The names and attributes are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import RequestMetrics, RequestOutput
from dovetail.contracts.pooling_params import PooledStates

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """The result of one request."""

    pooled: PooledStates
    """As it came: float32 in row order, to send on without a conversion."""

    @property
    def data(self) -> torch.Tensor:
        """float32 [n], or [tokens, n] with a vector for each token of the prompt; on the CPU, in memory of its own."""
        import torch  # a client that only passes bytes on does without

        return torch.frombuffer(bytearray(self.pooled.data), dtype=torch.float32).view(self.pooled.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """Scores of labels."""

    probs: list[float]
    """In the order of the checkpoint's labels; probabilities unless `use_activation` is False."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float
    """Of a cross-encoder its score, between 0 and 1 unless `use_activation` is False; else the cosine of the two
    embeddings."""


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledOutput(Generic[Result]):
    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finished: bool = True
    weight_version: int = 0
    """As in `RequestOutput`."""
    lora_request: LoRARequest | None = None
    """The adapter that was added to the weights, as it was asked for."""
    metrics: RequestMetrics | None = None
    """Times and counts. Of a score of two texts, those of the second."""


class SharedFields(TypedDict):
    """What all outputs that are made of one request say of it."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    weight_version: int
    lora_request: LoRARequest | None
    metrics: RequestMetrics | None


def shared_fields(output: RequestOutput | PoolingRequestOutput) -> SharedFields:
    """Those of `output`."""
    return SharedFields(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        weight_version=output.weight_version,
        lora_request=output.lora_request,
        metrics=output.metrics,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(_PooledOutput[PoolingOutput]):
    """The result of any pooling task. A request makes one output, its last."""

    error: str | None = None
    """Why the request failed or was aborted; `outputs` is empty then, of shape (0,)."""
    prompt: str | None = None

    @staticmethod
    def from_request(output: RequestOutput) -> PoolingRequestOutput:
        """The output of a request with `PoolingParams` under vLLM's names."""
        error = output.error
        if error is None and output.pooled is None:
            error = "the request was aborted before its prompt was computed"
        return PoolingRequestOutput(
            **shared_fields(output),
            outputs=PoolingOutput(pooled=output.pooled or PooledStates(shape=(0,), data=b"")),
            finished=output.finished,
            error=error,
            prompt=output.prompt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput(_PooledOutput[EmbeddingOutput]):
    """The embedding of a prompt."""

    @staticmethod
    def from_base(base: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """The same result as an embedding."""
        outputs = EmbeddingOutput(embedding=base.outputs.pooled.floats())
        return EmbeddingRequestOutput(**shared_fields(base), outputs=outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationRequestOutput(_PooledOutput[ClassificationOutput]):
    """The scores of a prompt's labels."""

    @staticmethod
    def from_base(base: PoolingRequestOutput) -> ClassificationRequestOutput:
        """The same result as scores of labels."""
        outputs = ClassificationOutput(probs=base.outputs.pooled.floats())
        return ClassificationRequestOutput(**shared_fields(base), outputs=outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput(_PooledOutput[ScoringOutput]):
    """The score of two texts. `prompt_token_ids` are those of both."""
