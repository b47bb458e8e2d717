"""Greedy: drafts are accepted as long as the target says the same."""

from collections.abc import Sequence

from dovetail.contracts.speculation import AcceptanceCapabilities, AcceptanceRule, Verdict, VerifyRequest


class Frozen(AcceptanceRule):
    contract = (1, 0)
    capabilities = AcceptanceCapabilities(lossless=True)
    preference = -100

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return [verdict(request) for request in requests]


def verdict(request: VerifyRequest) -> Verdict:
    drafts, wanted = request.draft.token_ids, request.target.tokens()
    count = 0
    while count < len(drafts) and drafts[count] == wanted[count]:
        count += 1
    return Verdict(range(count), int(wanted[count]))
