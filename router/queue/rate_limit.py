"""Limit tenants' requests and tokens per minute, by GCRA. Sans-IO.

    earned_at        when all taken units will have been earned back, at `per_minute` units a minute
    earned_at - now  seconds until then; a charge that would make this more than a minute is refused

Before its request runs, a tenant is charged for the prompt and the longest answer. Unused tokens are given back,
unless time has earned them back. Routers exchange their charges (spending.py), so each router's meters include all
charges.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from router.tenants.tenant import NO_LIMIT, Tenant
from shared.core.errors import InvalidRequest, RateLimited

WINDOW_S = 60.0
SLACK_S = 1e-6  # allowance for rounding errors of summed seconds
MOST_DEBT_S = 4 * WINDOW_S  # other routers' charges move `earned_at` at most this far beyond now
REQUESTS, TOKENS = "requests", "tokens"


class AboveLimit(InvalidRequest, code="above_rate_limit"):
    """A request needs more than its tenant's limit for a whole minute. A retry does not help."""


@dataclass(slots=True)
class Meter:
    """After a quiet minute, all units of a minute may be taken together."""

    per_minute: int
    earned_at: float = -math.inf

    def wait_s(self, cost: int, now: float) -> float:
        if self.per_minute == NO_LIMIT:
            return 0.0
        wait = max(self.earned_at, now) + self._seconds(cost) - WINDOW_S - now
        return wait if wait > SLACK_S else 0.0

    def take_cost(self, cost: int, now: float) -> None:
        if self.per_minute != NO_LIMIT:
            self.earned_at = max(self.earned_at, now) + self._seconds(cost)

    def take_for_others(self, cost: int, now: float) -> int:
        """Take units that another router has charged, up to a debt of MOST_DEBT_S. Return how many units were taken."""
        if self.per_minute == NO_LIMIT:
            return 0
        room_s = MOST_DEBT_S - self.reset_s(now)
        taken = max(0, min(cost, math.floor(room_s * self.per_minute / WINDOW_S)))
        self.take_cost(taken, now)
        return taken

    def give_back(self, cost: int) -> None:
        if self.per_minute != NO_LIMIT:
            self.earned_at -= self._seconds(cost)

    def unearned(self, earned_at: float, now: float) -> int:
        return max(0, math.floor((earned_at - now + SLACK_S) * self.per_minute / WINDOW_S))

    def remaining(self, now: float) -> int:
        free_s = WINDOW_S - self.reset_s(now) + SLACK_S
        return max(0, math.floor(free_s * self.per_minute / WINDOW_S))

    def reset_s(self, now: float) -> float:
        return max(0.0, self.earned_at - now)

    def _seconds(self, cost: int) -> float:
        return cost * WINDOW_S / self.per_minute


@dataclass(slots=True)
class Spent:
    """The units that this router has charged one tenant, minus returned units."""

    requests: int = 0
    tokens: int = 0


class Allowance:
    """One tenant's limits. Both meters charge a request, or neither does."""

    def __init__(self, spent: Spent) -> None:
        self.spent = spent
        self.meters = {REQUESTS: Meter(NO_LIMIT), TOKENS: Meter(NO_LIMIT)}

    def follow(self, tenant: Tenant) -> None:
        """Adopt the tenant's current limits; used units stay used."""
        self.meters[REQUESTS].per_minute = tenant.requests_per_minute
        self.meters[TOKENS].per_minute = tenant.tokens_per_minute

    def charge(self, num_tokens: int, now: float) -> Charge:
        """Charge one request and its tokens. Raise RateLimited with its retry time, or AboveLimit."""
        costs = {REQUESTS: 1, TOKENS: num_tokens}
        for unit, meter in self.meters.items():
            if NO_LIMIT < meter.per_minute < costs[unit]:
                raise AboveLimit(
                    f"this request needs up to {costs[unit]} {unit} (prompt and longest answer), above the limit of "
                    f"{meter.per_minute} a minute: ask for less"
                )
        waits = {unit: meter.wait_s(costs[unit], now) for unit, meter in self.meters.items()}
        unit = max(waits, key=lambda one: waits[one])
        if waits[unit]:
            meter = self.meters[unit]
            raise RateLimited(
                f"rate limit reached: {meter.per_minute} {unit} a minute; {meter.remaining(now)} left, "
                f"{costs[unit]} needed; try again in {shown_s(waits[unit])}",
                retry_after_s=waits[unit],
            )
        for unit, meter in self.meters.items():
            meter.take_cost(costs[unit], now)
        self.spent.requests += 1
        self.spent.tokens += num_tokens
        return Charge(self, num_tokens, self.meters[TOKENS].earned_at)

    def headers(self, now: float) -> dict[bytes, bytes]:
        """Return OpenAI's headers for the limits that are set."""
        headers = {}
        for unit, meter in self.meters.items():
            if meter.per_minute != NO_LIMIT:
                headers[f"x-ratelimit-limit-{unit}".encode()] = str(meter.per_minute).encode()
                headers[f"x-ratelimit-remaining-{unit}".encode()] = str(meter.remaining(now)).encode()
                headers[f"x-ratelimit-reset-{unit}".encode()] = shown_s(meter.reset_s(now)).encode()
        return headers


@dataclass(slots=True)
class Charge:
    """Tokens that a request has taken but not yet used."""

    allowance: Allowance
    num_tokens: int
    earned_at: float  # by the meter of tokens, right after this charge

    def settle(self, num_used: int, now: float) -> None:
        meter, unused = self.allowance.meters[TOKENS], max(0, self.num_tokens - num_used)
        if meter.per_minute != NO_LIMIT:
            unused = min(unused, meter.unearned(self.earned_at, now))
        meter.give_back(unused)
        self.allowance.spent.tokens -= unused
        self.num_tokens = 0

    def cancel(self, now: float) -> None:
        """Give everything back: the request was not admitted."""
        self.settle(0, now)
        self.allowance.meters[REQUESTS].give_back(1)
        self.allowance.spent.requests -= 1


class RateLimits:
    """Owned by the event loop. `spent` keeps removed tenants, so that counts never restart."""

    def __init__(self) -> None:
        self._allowances: dict[str, Allowance] = {}
        self.spent: dict[str, Spent] = {}

    def of(self, tenant: Tenant) -> Allowance:
        allowance = self._allowances.get(tenant.name)
        if allowance is None:
            spent = self.spent.setdefault(tenant.name, Spent())
            allowance = self._allowances[tenant.name] = Allowance(spent)
        allowance.follow(tenant)
        return allowance

    def keep(self, names: Collection[str]) -> None:
        self._allowances = {name: it for name, it in self._allowances.items() if name in names}

    def left(self, now: float) -> list[dict[str, object]]:
        return [
            {"tenant": name}
            | {unit: meter.remaining(now) for unit, meter in allowance.meters.items() if meter.per_minute != NO_LIMIT}
            for name, allowance in sorted(self._allowances.items())
            if any(meter.per_minute != NO_LIMIT for meter in allowance.meters.values())
        ]


def shown_s(seconds: float) -> str:
    """Return a time, rounded up, as in OpenAI's headers: 120ms, 1.5s, 2m3s."""
    milliseconds = max(0, math.ceil((seconds - SLACK_S) * 1000))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
