"""Estimate the length of tenants' next answers by their recent ones. Sans-IO."""

from __future__ import annotations

from router.requests.journal import OpenRequest
from router.tenants.tenant import Tenant

WEIGHT = 0.1  # of the newest request
FIRST_GUESS = 256.0  # in tokens, before the first answer


class AnswerLengths:
    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._mean_of_all: float | None = None

    def expected(self, tenant: Tenant) -> float:
        found = self._means.get(tenant.name, self._mean_of_all)
        return FIRST_GUESS if found is None else found

    def ended(self, request: OpenRequest) -> None:
        length = request.num_emitted / request.asked.num_sequences
        name = request.asked.tenant.name
        self._means[name] = moved(self._means.get(name), length)
        self._mean_of_all = moved(self._mean_of_all, length)


def moved(mean: float | None, sample: float) -> float:
    return sample if mean is None else mean + (sample - mean) * WEIGHT
