"""Prompts as a `RolloutModule` takes them, and what it returns: dicts with ChatLearn's keys.

Returned (`decoded`), with n rows, one for each completion in the order of the prompts, on the CPU:

    all_tokens           [n, seq_length], int64: prompt, completion, and `pad_token_id` behind them
    logprobs             [n, seq_length - 1], float32, nats: entry t is that of token t + 1; 0 for prompt and padding
    loss_mask            [n, seq_length], bool: whether the token is the completion's, its end token included
    no_padded_query_ids  n tensors [prompt], int64
    str_prompts          n texts; None where a prompt came as token ids alone
    str_outputs          n texts; "" where the engine has no tokenizer
    generation_lengths   [n], int64: tokens of the completion
    truncated            [n], bool: it ended for lack of tokens, or was aborted, and not by a stop
    weight_version       [n], int64: of the weights when the request came
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from dovetail.contracts.errors import RequestError
from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.rl.module_options import ModuleOptions
from dovetail.rl.rollout_batch import Batch, Result, Sample

Tokenize = Callable[[str], list[int]]


class PromptDataset(Dataset[dict[str, Any]]):
    """Prompts with their token ids: dicts that a data loader collates with `collate_fn`."""

    def __init__(self, prompts: Sequence[Any], options: ModuleOptions, num_repeats: int, tokenize: Tokenize):
        """`prompts`: texts, lists of token ids, or dicts with one of both under the keys of `options`; what else a dict
        has goes along. Each comes `num_repeats` times, one after the other. Raises `RequestError` with the index of
        what is no prompt or too long."""
        if not isinstance(prompts, Sequence) or isinstance(prompts, str):
            raise RequestError(f"prompts must be a list, got {type(prompts).__name__}")
        if not prompts:
            raise RequestError("prompts is empty: give at least one")
        entries = [_entry(prompt, f"prompts[{index}]", options, tokenize) for index, prompt in enumerate(prompts)]
        self.data = [dict(entry) for entry in entries for _ in range(num_repeats)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.data[index]

    def collate_fn(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """What `forward_step` takes: by key a list with the value of each sample."""
        return {key: [sample[key] for sample in samples] for key in samples[0]}


def prompts_of(data: Batch, options: ModuleOptions) -> list[tuple[str | None, list[int]]]:
    """(text, token ids) of each prompt of a batch. Raises `RequestError` with the key of what is wrong."""
    texts_key, ids_key = options.prompt_key, options.input_ids_key
    if not isinstance(data, Mapping):
        raise RequestError(f"data must be a dict of lists, as collate_fn makes it, got {type(data).__name__}")
    ids = data.get(ids_key)
    if ids is None:
        keys = ", ".join(map(str, data)) or "none"
        raise RequestError(f"data has no {ids_key!r} (its keys: {keys}): use build_dataset, or set input_ids_key")
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple) or not ids:
        raise RequestError(f"data[{ids_key!r}] must be a list with the token ids of one prompt at least")
    texts = data.get(texts_key)
    if texts is None:
        texts = [None] * len(ids)
    if not isinstance(texts, list | tuple) or len(texts) != len(ids) or not all(map(_is_text, texts)):
        raise RequestError(f"data[{texts_key!r}] must be a list of {len(ids)} texts, as many as data[{ids_key!r}] has")
    return [
        (text, _token_ids(row, f"data[{ids_key!r}][{index}]", options))
        for index, (text, row) in enumerate(zip(texts, ids, strict=True))
    ]


def decoded(outputs: Sequence[RequestOutput], options: ModuleOptions) -> Result:
    """The completions of `outputs`, padded. Raises `RequestError` for no outputs, and for some that have no log
    probabilities, or more tokens than `seq_length`."""
    if not outputs:
        raise RequestError("there are no outputs to decode")
    found: Result = {"all_tokens": [], "logprobs": [], "loss_mask": [], "no_padded_query_ids": []}
    found |= {"str_prompts": [], "str_outputs": []} | {key: [] for key in _COUNTS}
    for output in outputs:
        query = torch.tensor(output.prompt_token_ids)
        for completion in output.outputs:
            row = _row(query, completion, output.weight_version, options)
            for key, value in row.items():
                found[key].append(value)
            found["no_padded_query_ids"].append(query)
            found["str_prompts"].append(output.prompt)
            found["str_outputs"].append(completion.text)
    return found | {key: torch.cat(found[key]) for key in ("all_tokens", "logprobs", "loss_mask", *_COUNTS)}


_COUNTS = ("generation_lengths", "truncated", "weight_version")


def _row(query: torch.Tensor, completion: CompletionOutput, weight_version: int, options: ModuleOptions) -> Result:
    if completion.logprobs is None:
        raise RequestError("an output has no log probabilities: give outputs of requests that _add_request added")
    result = Sample(query, ()).result(completion, weight_version)
    left = options.seq_length - result["output_ids"].shape[1]
    if left < 0:
        raise RequestError(f"an output has {options.seq_length - left} tokens, and seq_length is {options.seq_length}")
    positions = torch.arange(options.seq_length)[None]
    total = result["unpadded_sequence_lengths"]
    return {
        "all_tokens": pad(result["output_ids"], (0, left), value=options.pad_token_id),
        "logprobs": pad(result["logprobs"][:, 1:], (0, left)),
        "loss_mask": (positions >= len(query)) & (positions < total),
    } | {key: result[key] for key in _COUNTS}


def _entry(prompt: Any, name: str, options: ModuleOptions, tokenize: Tokenize) -> dict[str, Any]:
    if not isinstance(prompt, Mapping):
        prompt = {options.prompt_key if isinstance(prompt, str) else options.input_ids_key: prompt}
    text, ids = prompt.get(options.prompt_key), prompt.get(options.input_ids_key)
    if ids is None and not (isinstance(text, str) and text):
        raise RequestError(
            f"{name} must be a text, token ids, or a dict with {options.prompt_key!r} or {options.input_ids_key!r}"
        )
    try:
        ids = tokenize(text) if ids is None else ids
    except RequestError as error:
        error.add_note(f"of {name}")
        raise
    return dict(prompt) | {options.prompt_key: text, options.input_ids_key: _token_ids(ids, name, options)}


def _is_text(text: Any) -> bool:
    return text is None or isinstance(text, str)


def _token_ids(row: Any, name: str, options: ModuleOptions) -> list[int]:
    if isinstance(row, torch.Tensor):
        row = row.tolist()
    if not isinstance(row, list | tuple) or not row or not all(type(token) is int for token in row):
        raise RequestError(f"{name} must be the token ids of a prompt, without padding")
    if len(row) > options.max_prompt_length:
        raise RequestError(
            f"{name} has {len(row)} tokens, and seq_length {options.seq_length} leaves {options.max_prompt_length}"
            f" for it (max_new_tokens is {options.max_new_tokens}): cut it, or raise seq_length"
        )
    return list(row)
