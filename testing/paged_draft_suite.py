"""Conformance suite of draft workers with layers of their own (capability `kv_cache`)::

from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite

class TestMyDrafter(PagedDraftWorkerSuite):
    worker_class = MyDrafter
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dovetail.contracts.model import ModelContext
from dovetail.contracts.speculation import DraftModel, DraftSetup, DraftWorker
from dovetail.nn.context import BuildContext
from dovetail.testing.draft_pages import SuitePages
from dovetail.testing.draft_rounds import assert_same_draft, first_path
from dovetail.testing.draft_suite import DraftWorkerSuite


class PagedDraftWorkerSuite(DraftWorkerSuite):
    """What every draft worker must do, and what its pages must hold."""

    def own_model(self) -> DraftModel | None:
        """The model that the host would load for a drafter with a `model_section`; override it for one that has any."""
        return None

    def create_context(self) -> ModelContext:
        """As `DraftSetup.create_context`."""
        return BuildContext(torch.float32, torch.device("cpu"), max_model_len=256, kv_dtype="float32")

    def setup(self) -> DraftSetup:
        """The suite's, and pages, and the drafter's own model."""
        return replace(super().setup(), model=self.own_model(), pages=SuitePages(), create_context=self.create_context)

    def create(self) -> DraftWorker:
        """A fresh worker, its layers bound to pages."""
        with torch.inference_mode():
            worker = super().create()
        layers = list(worker.attention_layers())
        assert bool(layers) == self.worker_class.capabilities.kv_cache, "layers and the capability kv_cache go together"
        pages = worker.setup.pages
        assert isinstance(pages, SuitePages)
        pages.bind(layers)
        return worker

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
        """After a round of which all, some or no drafts stood, it drafts as if it had never guessed."""
        start = self.batch(1, num_known=20)
        draft = self.create().propose(start)[0]
        assert draft is not None
        path = first_path(draft)
        for count in range(len(path) + 1):
            worker = self.create()
            worker.propose(start)
            worker.on_verified(0, path[:count], len(draft.token_ids))
            stood = [draft.token_ids[node] for node in path[:count]]
            known = np.array([*start.requests[0].token_ids, *stood, 1], dtype=np.int32)
            end = len(known) - 1
            goes_on = worker.propose(self.batch(1, first=19, end=end, known=known))
            assert_same_draft(goes_on[0], self.create().propose(self.batch(1, end=end, known=known))[0])
