"""Charge a tenant before its request runs, give unused tokens back afterwards, and count requests. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.queue.rate_limit import RateLimits
from router.tenants.book import Tenants
from router.tenants.tenant import Tenant
from shared.core.errors import BatonError
from shared.observe.log_once import LogOnce
from shared.observe.tenant_metrics import TenantMetrics

LATER = (429, 503)  # after these statuses, a client may retry


@dataclass(slots=True)
class Bill:
    was_admitted: bool = False
    num_used: int = 0  # tokens


class Desk:
    """Owned by the event loop."""

    def __init__(
        self,
        tenants: Tenants,
        metrics: TenantMetrics,
        once: LogOnce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = RateLimits()
        self._metrics, self._once, self._clock = metrics, once, clock
        self._tenants = tenants
        tenants.on_change = self._tenants_changed

    @contextmanager
    def charged(self, tenant: Tenant, num_tokens: int, show: Callable[[dict[bytes, bytes]], None]) -> Iterator[Bill]:
        """Charge the tenant, then run the `with` block. Raise RateLimited or AboveLimit. `show` gets the answer's
        headers, even if the request is refused."""
        allowance, now = self.limits.of(tenant), self._clock()
        with self.refusals(tenant):
            try:
                charge = allowance.charge(num_tokens, now)
            finally:
                show(allowance.headers(now))
            bill = Bill()
            try:
                yield bill
            finally:
                if bill.was_admitted:
                    charge.settle(bill.num_used, self._clock())
                    self._metrics.used(tenant.name, bill.num_used)
                else:
                    charge.cancel(self._clock())

    @contextmanager
    def refusals(self, tenant: Tenant) -> Iterator[None]:
        """Count an error of the `with` block that lets the tenant try again later."""
        try:
            yield
        except BatonError as error:
            if error.status in LATER:
                self._metrics.refused(tenant.name, error.code)
                self._once.info((tenant.name, error.code), "a tenant has to wait", tenant=tenant.name, code=error.code)
            raise

    def _tenants_changed(self) -> None:
        names = {tenant.name for tenant in self._tenants.all()}
        self.limits.keep(names)
        self._metrics.keep(names)
