"""What the profile of memory takes for the largest step, beside what steps of an engine really take."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.device import Device, DeviceMemory, Runtime, Work
from dovetail.contracts.executor import Placement
from dovetail.contracts.kv import KVGroup, KVLayout
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.speculation import Draft, DraftBatch, DraftWorker
from dovetail.engine.resolving import resolve
from dovetail.executors.gpu.host import HostDevice
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.largest_step import largest_inputs
from dovetail.worker.memory import kv_bytes
from dovetail.worker.model_worker import ModelWorker
from dovetail.worker.speculation.loaded_drafters import DraftRows, drafts_by_request, largest_drafts
from dovetail.worker.speculation.verifier import Verifier, VerifyOutput

LAYOUT = KVLayout(8, (KVGroup(0, (0,), None),), 64, 1)
VOCAB = 900
NUM_SEQS, NUM_DRAFTS = 6, 3
MEMORY = DeviceMemory(free=2**40, total=2**40)


@pytest.mark.parametrize(("tokens", "length", "counts"), [(100, 40, [40, 40, 20]), (30, 40, [30]), (200, 40, [40] * 3)])
def test_the_largest_step_is_as_long_as_may_be(tokens: int, length: int, counts: list[int]) -> None:
    inputs = largest_inputs(SchedulerLimits(tokens, 3, length), length, LAYOUT)
    assert inputs.seq_lens.tolist() == counts
    assert len(inputs.input_ids) == sum(counts)
    assert inputs.slot_mappings[0].max() == 7


@pytest.mark.parametrize(
    ("tokens", "length", "counts"),
    [(100, 40, (3, 3, 3, 3)), (10, 40, (3, 3, 1)), (9, 40, (3, 3)), (100, 2, (1, 1, 1, 1)), (100, 1, (0, 0, 0, 0))],
)
def test_as_many_rows_are_judged_as_a_step_has_room_for(tokens: int, length: int, counts: tuple[int, ...]) -> None:
    assert drafts_by_request(3, 4, SchedulerLimits(tokens, 4, length)) == counts


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 60), st.integers(1, 12))
def test_no_more_rows_are_judged_than_were_computed(num_drafts: int, num_seqs: int, more: int, length: int) -> None:
    limits = SchedulerLimits(num_seqs + more, num_seqs, length)
    rows = DraftRows(drafts_by_request(num_drafts, num_seqs, limits), has_probs=False).num_rows
    assert rows <= len(largest_inputs(limits, length, LAYOUT).input_ids)


def storages(values: Any) -> list[torch.UntypedStorage]:
    """The memory of the tensors among them; weights that oneDNN packed have none that can be named."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made under it that are still there, as a device's allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in storages([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given | self._alive:  # neither a view nor changed in place
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, which: int, num_bytes: int) -> None:
        self._alive.discard(which)
        self.now -= num_bytes


class MeteredDevice(HostDevice):
    """A CPU that knows what is allocated."""

    def memory(self) -> DeviceMemory:
        return MEMORY

    def measure(self, work: Work) -> int:
        with LiveBytes() as live:
            work()
        return live.peak


def metered(name: str) -> Device:
    return MeteredDevice(name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_tiny_model(directory / "target", tiny_config("llama", vocab_size=VOCAB))
    save_tiny_model(directory / "draft", tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=1), seed=1)
    return directory


def sections(models: Path, drafter: dict[str, Any] | None) -> dict[str, Any]:
    model = {"path": str(models / "target"), "tokenizer_mode": "none", "dtype": "float32", "operators": None}
    config: dict[str, Any] = {
        "model": model | {"max_model_len": 64},
        "cache": {"block_size": 8, "num_blocks": 80},
        "attention": "reference",
        "executor": {"name": "gpu", "device": "null"},
        "scheduler": {"max_num_seqs": NUM_SEQS, "max_num_batched_tokens": 32},
    }
    if drafter is not None:
        drafter = drafter | {"num_tokens": NUM_DRAFTS, "length": "fixed"}
        config["speculative"] = {"drafters": {"d": drafter}, "acceptance": "rejection"}
    return config


def profiled_peak(config: dict[str, Any]) -> int:
    """What a worker that was given no size for its KV cache leaves free for the largest step."""
    resolved = resolve(load_config(config))
    cache = replace(resolved.cache, num_blocks=None, memory_bytes=None)
    worker = ModelWorker(replace(resolved, cache=cache), Placement(device="cpu", runtime=Runtime(metered)))
    worker.load()
    available: int = worker.call("describe").available_bytes
    worker.close()
    return kv_bytes(MEMORY, cache.memory_fraction, 0) - available


class Guesses(DraftWorker):
    """Drafts that were not drawn, as many as are wanted."""

    contract = (1, 0)

    def propose(self, batch: DraftBatch) -> list[Draft]:
        return [Draft([3] * request.max_drafts) for request in batch.requests]


@pytest.mark.parametrize("drafter", [None, "guesses", "draft_model"])
def test_steps_take_what_was_profiled(models: Path, drafter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that ask for all that takes memory; of the draft model, with distributions of their drafts."""
    options = {
        "guesses": {"name": f"{__file__}:Guesses"},
        "draft_model": {"name": "draft_model", "path": str(models / "draft"), "attention": "reference"},
    }
    config = sections(models, None if drafter is None else options[drafter])
    rows = [0]
    verify = Verifier.verify

    def watched(self: Verifier, logits: torch.Tensor, requests: Any) -> VerifyOutput:
        rows.append(len(logits))
        return verify(self, logits, requests)

    params = SamplingParams(
        temperature=1.0, top_k=VOCAB - 1, top_p=0.9, presence_penalty=0.5, logprobs=3, max_tokens=6, ignore_eos=True
    )
    prompts = [[*range(3, 9), *range(3, 9)] for _ in range(NUM_SEQS)]
    with LLM(**config) as llm:
        monkeypatch.setattr(Verifier, "verify", watched)
        with LiveBytes() as live:
            llm.generate(prompts, [replace(params, seed=seed) for seed in range(NUM_SEQS)])
        monkeypatch.undo()
    profiled = profiled_peak(config)
    # Not to the byte: attention backends keep a few indices of the step that they planned.
    assert profiled == pytest.approx(live.peak, rel=0.01)
    resolved = resolve(load_config(config))
    largest = largest_drafts(resolved.speculation, resolved.limits) if resolved.speculation else []
    assert max((drafts.num_rows for drafts in largest), default=0) == max(rows)
    assert max(rows) == (NUM_SEQS * (1 + NUM_DRAFTS) if drafter else 0)
