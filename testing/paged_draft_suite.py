"""Conformance suite of draft workers with layers of their own (`KeepsLayers`)::

from dovetail.testing import PagedDraftWorkerSuite

class TestMyDrafter(PagedDraftWorkerSuite):
    plugin = MyDrafter
"""

from __future__ import annotations

import numpy as np
import torch

from dovetail.contracts.speculation import DraftSetup, DraftWorker, KeepsLayers, LoadsModel
from dovetail.testing.draft_pages import SuitePages
from dovetail.testing.draft_rounds import assert_same_draft, first_path
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.worker.speculation.drafters import against_caches


class PagedDraftWorkerSuite(DraftWorkerSuite):
    """What every draft worker must do, and what its pages must hold."""

    def _create(self, setup: DraftSetup) -> DraftWorker:
        # Its layers are bound to pages.
        with torch.inference_mode():
            worker = super()._create(setup)
        assert isinstance(worker, KeepsLayers), "drafters with attention layers derive from KeepsLayers"
        layers = list(worker.attention_layers())
        assert layers, "attention_layers names no layer"
        pages = worker.setup.pages
        assert isinstance(pages, SuitePages)
        pages.bind(layers)
        return worker

    def test_announces_what_its_layers_cache(self) -> None:
        """`caches` says from configs alone what the layers turn out to cache; the host refuses anything else."""
        plugin, need = self.plugin, self.need()
        assert issubclass(plugin, KeepsLayers)
        if issubclass(plugin, LoadsModel):
            assert need.model is not None, "override need() too, so that it describes the model of own_model()"
        worker = self.create()
        assert isinstance(worker, KeepsLayers)
        announced = plugin.caches(self._options(), need)
        assert against_caches(plugin.__name__, announced, worker.attention_layers()) == []

    def test_takes_in_a_prompt_in_parts(self) -> None:
        """Its pages are right after every step, whether it drafts or not."""
        worker = self.create()
        worker.propose(self.batch(2, max_drafts=0, end=13))
        worker.propose(self.batch(2, max_drafts=0, first=13, end=30))
        parts = worker.propose(self.batch(2, first=30))
        whole = self.create().propose(self.batch(2))
        for part, at_once in zip(parts, whole, strict=True):
            assert_same_draft(part, at_once)

    def test_goes_on_whatever_stood(self) -> None:
        """After a round of which all, some or no draft tokens were accepted, it drafts as if it had never drafted."""
        start = self.batch(1, num_known=20)
        draft = self.create().propose(start)[0]
        assert draft is not None
        path = first_path(draft)
        for count in range(len(path) + 1):
            worker = self.create()
            worker.propose(start)
            worker.on_verified(0, path[:count], len(draft.token_ids))
            accepted = [draft.token_ids[node] for node in path[:count]]
            known = np.array([*start.requests[0].token_ids, *accepted, 1], dtype=np.int32)
            end = len(known) - 1
            goes_on = worker.propose(self.batch(1, first=19, end=end, known=known))
            assert_same_draft(goes_on[0], self.create().propose(self.batch(1, end=end, known=known))[0])
