"""Batches of rollouts as plain dicts of tensors, with NeMo RL's keys.

Sent (`GenerationDatumSpec` there): `input_ids`, integers [batch, length], padded on the right; `input_lengths`,
integers [batch]; and, where samples have stop strings of their own, `stop_strings`: for each a list of texts, or None.

Returned for one sample (`GenerationOutputSpec` there), with total = prompt + completion:

    output_ids                 [1, total], of the dtype of input_ids
    logprobs                   [1, total], float32, nats: 0 for the prompt
    generation_lengths         [1], int64: tokens of the completion
    unpadded_sequence_lengths  [1], int64: total
    truncated                  [1], bool: it ended for lack of tokens, or was aborted, and not by a stop
    weight_version             [1], int64: of the weights when it came, as `WeightsReport.version`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.outputs import CompletionOutput
from dovetail.contracts.sampling import SamplingParams

Batch = Mapping[str, Any]
"""What a caller sends."""
Result = dict[str, Any]
"""What comes back for one sample."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts are sampled; the same for all samples of a worker. Values that no request may have are refused when
    the first request has them."""

    max_new_tokens: int
    """Of a completion; fewer where the model's length ends before."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    """None: all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""
    stop_strings: tuple[str, ...] = ()
    """Completions end with them, and contain them."""
    ignore_eos: bool = False
    """Whether completions go on behind the model's end tokens."""
    pad_token_id: int = 0
    """What `input_ids` has behind the end of a prompt."""
    logprobs_mode: str | None = None
    """`SamplingParams.logprobs_mode`; None: the engine's."""

    def sampling_params(
        self, max_tokens: int, stop: Sequence[str], greedy: bool, with_text: bool = False
    ) -> SamplingParams:
        """Of a sample that may have `max_tokens` and ends with one of `stop` too; `with_text`: somebody reads its text.
        Raises `RequestError`."""
        stops = (*self.stop_strings, *stop)
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy or self.top_k is None else self.top_k,
            max_tokens=max_tokens,
            stop=stops,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=bool(stops),
            ignore_eos=self.ignore_eos,
            logprobs=0,
            logprobs_mode=self.logprobs_mode,
            detokenize=with_text or bool(stops),
            output_kind="final_only",
        )


@dataclass(frozen=True)
class Sample:
    """One row of a batch."""

    row: torch.Tensor
    """[tokens], without padding."""
    stop_strings: tuple[str, ...]

    @property
    def token_ids(self) -> list[int]:
        """As the engine takes them."""
        ids: list[int] = self.row.tolist()
        return ids

    def result(self, completion: CompletionOutput | None, weight_version: int) -> Result:
        """What the sample became. None: there was no token left for a completion."""
        new_ids = [] if completion is None else completion.token_ids
        positions = (completion.logprobs or []) if completion is not None else []
        drawn = [position[token].logprob for token, position in zip(new_ids, positions, strict=True)]
        device = self.row.device
        total = len(self.row) + len(new_ids)
        logprobs = torch.zeros(1, total, dtype=torch.float32, device=device)
        logprobs[0, len(self.row) :] = torch.tensor(drawn, dtype=torch.float32)
        is_cut = completion is None or completion.finish_reason != "stop"
        return {
            "output_ids": torch.cat([self.row, torch.tensor(new_ids, dtype=self.row.dtype, device=device)])[None],
            "logprobs": logprobs,
            "generation_lengths": torch.tensor([len(new_ids)], device=device),
            "unpadded_sequence_lengths": torch.tensor([total], device=device),
            "truncated": torch.tensor([is_cut], device=device),
            "weight_version": torch.tensor([weight_version], device=device),
        }


def samples_of(data: Batch, pad_token_id: int) -> list[Sample]:
    """The rows of a batch. Raises `RequestError` with the key for what is no batch, or not padded on the right."""
    ids, lengths = _integers(data, "input_ids", 2), _integers(data, "input_lengths", 1)
    if len(ids) != len(lengths):
        raise RequestError(f"input_ids has {len(ids)} rows and input_lengths {len(lengths)}: give each row its length")
    width = ids.shape[1]
    wrong = ((lengths < 1) | (lengths > width)).nonzero().flatten().tolist()
    if wrong:
        raise RequestError(f"input_lengths[{wrong[0]}] is {int(lengths[wrong[0]])}, and must be 1 to {width}")
    is_padding = torch.arange(width, device=ids.device)[None] >= lengths.to(ids.device)[:, None]
    wrong = (is_padding & (ids != pad_token_id)).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise RequestError(
            f"input_ids[{row}, {column}] is {int(ids[row, column])} behind the end of its prompt, where pad_token_id"
            f" {pad_token_id} is expected: prompts are padded on the right"
        )
    stops = _stop_strings(data, len(ids))
    return [Sample(row[:length], stop) for row, length, stop in zip(ids, lengths.tolist(), stops, strict=True)]


def texts_of(data: Batch) -> list[tuple[str, tuple[str, ...]]]:
    """The `prompts` of a batch of texts, each with its stop strings. Raises `RequestError`."""
    prompts = data.get("prompts")
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("prompts must be a list of texts; token ids are for generate_async")
    return list(zip(prompts, _stop_strings(data, len(prompts)), strict=True))


def _integers(data: Batch, key: str, num_dims: int) -> torch.Tensor:
    given = data.get(key)
    if not isinstance(given, torch.Tensor):
        raise RequestError(f"{key} must be a tensor, got {type(given).__name__}")
    if given.ndim != num_dims or given.is_floating_point() or given.dtype is torch.bool:
        shape = "[batch, length]" if num_dims == 2 else "[batch]"
        raise RequestError(f"{key} must be integers {shape}, got {given.dtype} {list(given.shape)}")
    return given


def _stop_strings(data: Batch, num_samples: int) -> list[tuple[str, ...]]:
    given = data.get("stop_strings")
    if given is None:
        return [()] * num_samples
    if not isinstance(given, list | tuple) or len(given) != num_samples:
        raise RequestError(f"stop_strings must be a list with an entry for each of the {num_samples} samples")
    wrong = [index for index, stops in enumerate(given) if not isinstance(stops, list | tuple | None)]
    if wrong:
        raise RequestError(f"stop_strings[{wrong[0]}] must be a list of texts, or None, got {given[wrong[0]]!r}")
    return [tuple(stops or ()) for stops in given]
