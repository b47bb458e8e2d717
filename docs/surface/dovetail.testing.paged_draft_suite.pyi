from dovetail.contracts.speculation import DraftWorker
from dovetail.testing.draft_suite import DraftWorkerSuite


class PagedDraftWorkerSuite(DraftWorkerSuite):
    def create(self) -> DraftWorker: ...
