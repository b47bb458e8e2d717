"""What the suite of drafters with layers of their own finds, and the host refuses: caches that are not as announced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM
from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftBatch, KeepsLayers, LayerSetup, SpeculationNeed
from dovetail.nn import Attention
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


class TwoLayers(KeepsLayers):
    """Two layers, of which the second has a window; it guesses the same token always."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, setup: LayerSetup):
        super().__init__(options, setup)
        context = setup.create_context()
        for window in (None, 16):
            Attention(context, num_heads=2, num_kv_heads=1, head_size=8, scale=1.0, window=window)
        self._layers = context.attention_layers

    @classmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]:
        return [KVSpec(num_kv_heads=1, head_size=8, dtype=need.kv_dtype)] * 2

    def attention_layers(self) -> Sequence[AttentionModule]:
        return self._layers

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [Draft([1] * request.max_drafts) for request in batch.requests]


class AnnouncesOneLayer(TwoLayers):
    @classmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]:
        return super().caches(options, need)[:1]


class AnnouncesSmallHeads(TwoLayers):
    @classmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]:
        return [KVSpec(num_kv_heads=1, head_size=4, dtype=need.kv_dtype)] * 2


class AnnouncesOtherPages(TwoLayers):
    @classmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]:
        return [KVSpec(num_kv_heads=1, head_size=8, dtype="float64")] * 2


class NamesNoLayer(TwoLayers):
    def attention_layers(self) -> Sequence[AttentionModule]:
        return []


ANNOUNCES = "test_announces_what_its_layers_cache"
FAULTS = [
    Fault("announces one layer of two", AnnouncesOneLayer, ANNOUNCES),
    Fault("announces smaller heads", AnnouncesSmallHeads, ANNOUNCES),
    Fault("announces pages of another dtype", AnnouncesOtherPages, ANNOUNCES),
    Fault("names no layer", NamesNoLayer, ANNOUNCES),
]


class TestTwoLayers(PagedDraftWorkerSuite):
    plugin = TwoLayers


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_drafter_that(fault: Fault) -> None:
    check_fault(fault, PagedDraftWorkerSuite, plugin=fault.plugin)


@pytest.fixture
def start(tmp_path: Path) -> Callable[[type], LLM]:
    """An engine with a drafter of this class, "mine"."""
    save_tiny_model(tmp_path, tiny_config("llama"))

    def create(plugin: type) -> LLM:
        drafter = {"name": f"{__name__}:{plugin.__name__}", "attention": "reference"}
        return LLM(
            model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"},
            cache={"num_blocks": 100},
            executor={"threads": 1},
            speculative={"drafters": {"mine": drafter}},
        )

    return create


@pytest.mark.parametrize("plugin", [AnnouncesOneLayer, AnnouncesSmallHeads, NamesNoLayer])
def test_the_host_refuses_it_by_name(start: Callable[[type], LLM], plugin: type) -> None:
    with pytest.raises(PluginError, match=rf"drafters\.mine: {plugin.__name__}'s caches\(\) announces"):
        start(plugin)


def test_the_host_takes_one_that_tells_of_no_window(start: Callable[[type], LLM]) -> None:
    with start(TwoLayers) as llm:
        assert llm.generate([[5, 6, 7]], use_tqdm=False)[0].metrics.drafter == "mine"
