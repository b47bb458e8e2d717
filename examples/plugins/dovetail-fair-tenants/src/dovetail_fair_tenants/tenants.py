"""Who a request belongs to, and how much each tenant may have."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.scheduler import RequestState


class Tenants:
    """Reads tenants from requests, and their weights from the config."""

    def __init__(self, key: str, weights: Mapping[str, float]):
        self._key = key
        self._weights = weights

    def name(self, request: RequestState) -> str:
        """The tenant, whatever type its user gave; "" for a request that names none."""
        return str(request.extra.get(self._key, ""))

    def weighted(self, tenant: str, num_tokens: int) -> float:
        """Tokens over the tenant's weight: what they count for a tenant of weight 1."""
        return num_tokens / self._weights.get(tenant, 1.0)
